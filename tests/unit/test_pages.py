"""Pages of docs/ that are made from docs/results: each figure is that of the stored results."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("horovod.torch")

from matplotlib.figure import Figure

import pages
from benchmarks import network, trouble
from benchmarks.wire import ways
from horovod_topk.cli.bench.methods import parse_methods
from horovod_topk.cli.bench.nic import Sent
from pages import RESULTS
from pages.markdown import spread
from study import does_it_pay, page
from study.results import Study

pytestmark = pytest.mark.tools

# Each with the fewest runs that it can have.
STUDIES = {"accuracy": 101, "default": 101, "frontier": 101, "practice": 101, "methods": 40}
STUDIES |= {"local_steps": 101, "optimizers": 101}
# Numbers of the README's template that are no measurements, with the words beside them.
PLAIN = (
    *("4 bits", "16 bits", "ResNet-50", "H200", "FSDP2", "C++17", "x86-64", "float32"),
    *("1 Gbit/s", "10 Gbit/s", "100 Mbit/s", "8 hosts", "8 ranks", "on 64"),
    *("Stich 2018", "Karimireddy 2019", "et al. 2022", "Apache-2.0", "Python 3.11", "Keras 3,"),
    *("PyTorch 2.13", "TensorFlow 2.20", "Keras 3.15", "Horovod 0.28.1"),
)


@pytest.mark.parametrize("name", [*pages.templates()])
def test_a_page_is_that_of_its_results(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: None)
    assert pages.place(name).read_text() == pages.text(name)


def test_the_readme_is_short() -> None:
    text = pages.place("readme").read_text()
    assert len(text.splitlines()) <= 120
    assert len(text.split()) <= 900


def hand_written(template: str) -> list[str]:
    """Numbers that neither come from results nor are known to be no measurements."""
    others = r"^```.*?^```$|\{\{.*?\}\}|`[^`\n]*`|\]\([^)]*\)"  # code, figures, links
    text = re.sub(others, "", template, flags=re.M | re.S)
    for words in PLAIN:
        text = text.replace(words, "")
    return re.findall(r".*\d.*", text)


def test_every_figure_of_the_readme_comes_from_results() -> None:
    template = pages.template("readme")
    assert hand_written(template) == []
    assert hand_written(template + "It is 3 times faster.") == ["It is 3 times faster."]


def test_results_are_written_on_every_page_that_shows_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pages, "place", lambda page: pages.ROOT / tmp_path / page)
    monkeypatch.setattr(pages, "text", lambda page: "")
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    pages.write("plan-grid")
    assert {path.name for path in tmp_path.iterdir()} == {"network", "readme"}


def test_the_page_on_the_data_names_every_file() -> None:
    text = (pages.DOCS / "results.md").read_text()
    files = [path.name for path in RESULTS.iterdir() if path.suffix in (".json", ".jsonl")]
    assert not {name for name in files if f"`{name}`" not in text}


def test_figures_are_put_in_and_their_paragraphs_wrapped_anew() -> None:
    template = "So\nmuch:\n{{number:.1f}}.\n\n- {{double |  a  }}\n  b\n- c\n\nleft\nalone\n"
    found = pages.filled_in(template, {"number": 2.04, "double": lambda text: 2 * text})
    assert found == "So much: 2.0.\n\n- aa b\n- c\n\nleft\nalone\n"
    with pytest.raises(ValueError, match="write one of number"):
        pages.filled_in("so much: {{numbre}}", {"number": 1})


def test_one_or_two_seeds_are_written_as_they_are() -> None:
    assert spread([5.731], "+", "%") == "+5.73%"
    assert spread([0.88, -0.69], "+", "%") == "+0.88%, -0.69%"
    assert spread([-0.001, 0.5], "+") == "+0.00, +0.50"


@pytest.mark.parametrize("values", [[1.0, 2.0, 3.0], [3.0, 1.0, 2.0]])
def test_three_seeds_are_a_mean_with_its_standard_error(values: list[float]) -> None:
    assert spread(values, unit="%") == "2.00 ± 0.58%"


# Studies


@pytest.mark.parametrize("name", [*STUDIES, "parts", "unseen"])
def test_every_result_belongs_to_a_setting(name: str) -> None:
    """Otherwise a run would be made again, and its old result would be on no page.

    Runs with settings that are no settings any more are kept, and on no page.
    """
    lines = (RESULTS / f"{name}.jsonl").read_text().splitlines()
    lines = [each for each in lines if "velocity_kept" not in each and "='optimizer'" not in each]
    assert len(list(Study(name).runs())) == len(lines) >= STUDIES.get(name, 40)


@pytest.mark.parametrize("path", ["docs/choosing.md"])
def test_pages_repeat_the_table_of_the_default(path: str) -> None:
    text = (pages.DOCS / "default.md").read_text()
    found = re.search(r"## In short.*?\n(\|.*?)\n\n", text, re.DOTALL)
    assert found
    assert found[1] in (pages.DOCS.parent / path).read_text()


def test_a_figure_or_a_case_that_is_not_there_is_an_error() -> None:
    values = page.values(Study("methods"))
    with pytest.raises(ValueError, match="write one of"):
        pages.filled_in("so much: {{diference | x}}", values)
    with pytest.raises(ValueError, match="no case matches"):
        pages.filled_in("so much: {{costs | x | y}}", values)


def test_figures_come_from_runs() -> None:
    """One figure by hand."""
    lines = (RESULTS / "frontier.jsonl").read_text().splitlines()
    ends: dict[str, Any] = {}
    for line in map(json.loads, lines):
        cell = line["cell"]
        words = ("bytelm", "sgd", "equal", "4000")
        given = cell["arguments"]
        if cell["seed"] == 0 and {*words} <= {*given} and len(given) == 10:  # no ablation
            ends[cell["compressor"]] = line["points"][-1]["metrics"]["bits_per_byte"]
    settings = "ratio=0.01, values='float32', momentum=0, follow_lr=False, warmup=None"
    cost = 100 * (ends[f"TopKEF({settings})"] / ends["none"] - 1)
    row = Study("frontier").rows("Byte GPT, SGD, equal shards")["allgather float32 0.01"]
    assert row.costs[0] == pytest.approx(cost)


# Benchmarks


def test_every_method_can_be_had() -> None:
    for run in network.RUNS.values():
        assert [each.name for each in parse_methods(",".join(run.methods))] == list(run.methods)


def test_what_trouble_changes_is_said_of_the_last_step_that_both_jobs_recorded() -> None:
    results = pages.stored("trouble")
    marks = results["loss-10"]["ways"]["TopKEF"]["marks"]
    assert set(marks) < set(results[trouble.PLAIN]["ways"]["TopKEF"]["marks"])
    for step in sorted(marks, key=int):
        assert trouble.is_same(results, "loss-10", "TopKEF")
        marks[step][1] |= {"weights": "others"}
    assert not trouble.is_same(results, "loss-10", "TopKEF")


def test_resent_packets_are_a_share_of_those_of_all_hosts() -> None:
    segments = [{"sent": 90, "resent": 1}, {"sent": 110, "resent": 3}]
    assert trouble.resent({"segments": segments}) == pytest.approx(4 / 200)


# Bytes at the network card


def test_bytes_are_all_that_leaves_the_card_and_what_is_carried_is_payload() -> None:
    assert (Sent(7, 2000) - Sent(2, 500)).payload == 1500 - 5 * 66


def test_nodes_are_exchanged_between_where_there_are_some() -> None:
    assert not [way for way in ways() if way.exchange == "hierarchical"]
    assert len([way for way in ways(slots=2) if way.exchange == "hierarchical"]) == 3


# Loss against hours


def test_a_loss_is_reached_between_two_points() -> None:
    points = [(100, 4.0), (200, 3.0), (300, 3.5)]
    assert does_it_pay.reached(points, 4.5) == 100
    assert does_it_pay.reached(points, 3.25) == 175
    assert does_it_pay.reached(points, 2.9) == math.inf


def test_16_bits_have_the_faster_step_of_two() -> None:
    variants = {"bfloat16": {"seconds": [3.0]}, "PyTorch's float16": {"seconds": [1.0, 2.0, 9.0]}}
    joined = does_it_pay.Joined(
        Study("does_it_pay"), "byte GPT*", {"1gbit": {"variants": variants}}
    )
    assert joined.seconds("1gbit", "bfloat16") == 2.0
    assert math.isnan(joined.seconds("100mbit", "bfloat16"))
    assert math.isnan(joined.seconds("1gbit", "TopKEF"))


def test_seldom_used_experts_are_told_from_others() -> None:
    run = {"used": [[0.2, 1.0]], "gradient": [[2.0, 1.0]], "residual": [[1.0, 4.0]]}
    found = does_it_pay.use_table({"runs": {"TopKEF": run}})
    assert found.endswith("| 0.5 (1) |\n| in up to 95% | none |\n| in more | 4.0 (1) |")
