"""Pages of docs/ that are made from docs/results: each figure is that of the stored results."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("horovod.torch")

from matplotlib.figure import Figure

import pages
from benchmarks import network, network_page, trouble, trouble_page, wire_page, wire_rank
from benchmarks.wire import DENSE, ways
from benchmarks.wire_page import INT8, NO, WITHOUT, YES, figures, reductions
from horovod_topk.cli.bench.methods import parse_methods
from horovod_topk.cli.bench.nic import Sent
from horovod_topk.cost.quantities import bits_per_second
from pages import RESULTS
from pages.markdown import spread
from study import page
from study.results import Study

pytestmark = pytest.mark.tools

# Each with the fewest runs that it can have.
STUDIES = {"accuracy": 101, "default": 101, "frontier": 101, "practice": 101, "methods": 40}
# Not kernels, whose rows of momentum are of an older version, nor plan-grid, whose constants are
# fitted anew and may differ in the last digit.
OTHERS = ("readme", "schedules", "crashes", "network", "residuals", "trouble", "wire")
PAGES = (*STUDIES, "local-steps", *OTHERS)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_that_of_its_results(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: None)
    assert pages.place(name).read_text() == pages.text(name)


def test_the_readme_is_short() -> None:
    text = pages.place("readme").read_text()
    assert len(text.splitlines()) <= 120
    assert len(text.split()) <= 900


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
        pages.filled_in("so much: {{dense | x}}", values)


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


def test_steps_to_a_score_lie_between_the_lengths_measured() -> None:
    ends = {1000: 3.0, 2000: 2.0, 4000: 1.5}
    assert page.needed(ends, 3.5) == 1000
    assert page.needed(ends, 2.5) == pytest.approx(1000 * 2**0.5)
    assert page.needed(ends, 2.0) == pytest.approx(2000)
    assert page.needed(ends, 1.0) == math.inf


# Step time against bandwidth


def timed(key: str, ours: float, dense: float = 10.0) -> dict[str, Any]:
    """A run in which an exchange takes so many seconds: ours, dense ones, and PowerSGD's 1."""
    seconds = dict.fromkeys(network.RUNS[key].methods, ours) | {"none": 0.0, "powersgd": 1.0}
    seconds |= {n: 10.0 for n in seconds if n.startswith(("ddp-", "fp16", "dense-")) or n == "ddp"}
    seconds["dense"] = dense
    methods = [
        {"name": name, "what": "", "bytes": 1e6, **dict.fromkeys(("seconds", "cpu"), [0.1 + s] * 3)}
        for name, s in seconds.items()
    ]
    return {"methods": methods, "ranks": 4, "rate": bits_per_second(network.RUNS[key].rate)}


def test_every_method_can_be_had() -> None:
    for run in network.RUNS.values():
        assert [each.name for each in parse_methods(",".join(run.methods))] == list(run.methods)


@pytest.mark.parametrize(("ours", "met"), [(0.15, 9), (0.3, 6), (0.9, 3), (2.0, 2)])
def test_goals_of_time_are_met_or_not(ours: float, met: int) -> None:
    found = {key: network_page.figures(timed(key, ours)) for key in network.RATES}
    said = [verdict[-1] for verdict in network_page.verdicts(found)]
    assert (said.count("yes"), len(said)) == (met, len(network_page.GOALS))


def test_a_goal_is_about_the_baseline_that_sleeps() -> None:
    found = {"1gbit": network_page.figures(timed("1gbit", 0.2, dense=20.0))}
    measured = next(network_page.verdicts(found))[2]
    assert measured == "50.0 times less than `dense-waiting`; 50.0 than `ddp`; 100.0 than `dense`"


# Slow ranks and lost packets


def test_what_trouble_changes_is_said_of_the_last_step_that_both_jobs_recorded() -> None:
    results = pages.stored("trouble")
    (step, here, plain) = trouble_page.compared(results, "loss-10", "TopKEF")
    assert int(step) == min(
        max(map(int, results[key]["ways"]["TopKEF"]["marks"])) for key in ("loss-10", trouble.PLAIN)
    )
    assert trouble_page.is_same(here, plain, "weights")
    here[1] |= {"weights": "others"}
    assert not trouble_page.is_same(here, plain, "weights")
    assert " | differ | equal | " in pages.made("trouble", trouble_page.values(results))


def test_resent_packets_are_a_share_of_those_of_all_hosts() -> None:
    segments = [{"sent": 90, "resent": 1}, {"sent": 110, "resent": 3}]
    assert trouble_page.resent({"segments": segments}) == pytest.approx(4 / 200)


# Bytes at the network card

DENSE_BYTES = 2_000_000.0


def counted(times_fewer: float) -> dict[str, Any]:
    """A job in which every way but dense sends so many times fewer bytes.

    Five percent of the bytes are headers, a share is carried, and the rest is negotiation.
    """
    found = []
    for number, way in enumerate(ways()):
        card = DENSE_BYTES if way.name == DENSE else DENSE_BYTES / times_fewer
        carried = (0.9 - 0.01 * number) * card
        host = {"seconds": 1.0, "bytes": card, "idle_bytes": 0.2 * card, "payload": 0.95 * card}
        host |= {"cycles": 20, "exchanged_bytes": 0.9 * card, "exchanged_payload": carried}
        host["stats"] = None if way.name == DENSE else carried
        found.append({"way": way.name, "hosts": [host, dict(host)]})
    return {"ways": found}


def test_bytes_are_all_that_leaves_the_card_and_what_is_carried_is_payload() -> None:
    assert (Sent(7, 2000) - Sent(2, 500)).payload == 1500 - 5 * 66
    found = figures(counted(200))
    assert reductions(found)[INT8] == pytest.approx(200)
    assert found[INT8].carried == pytest.approx(found[INT8].stats)


def test_goals_of_bytes_are_met_by_every_number_of_hosts_or_not_at_all() -> None:
    enough = {hosts: figures(counted(1500)) for hosts in (2, 8)}
    assert {verdict.met for verdict in wire_page.verdicts(enough)} == {YES}
    first = next(wire_page.verdicts(enough | {4: figures(counted(160))}))
    assert first.goal.startswith(f"{INT8}: at least 165x")
    assert first.met == NO
    assert first.measured == "160x (4 hosts), without negotiation 160x (4 hosts)"


def test_a_goal_met_without_negotiation_alone_is_called_that() -> None:
    chatty = counted(1500)
    for way in chatty["ways"]:
        for host in way["hosts"] if way["way"] == INT8 else ():
            host |= {"bytes": DENSE_BYTES / 150, "exchanged_bytes": 0.8 * DENSE_BYTES / 150}
    first = next(wire_page.verdicts({2: figures(chatty)}))
    assert first.met == WITHOUT
    assert first.measured == "150x (2 hosts), without negotiation 169x (2 hosts)"


@pytest.mark.parametrize(("error", "met"), [(0.04, YES), (0.06, NO), (-0.06, NO)])
def test_a_card_that_contradicts_stats_is_reported(error: float, met: str) -> None:
    """However many bytes of framing there are."""
    off = counted(1500)
    for number, way in enumerate(off["ways"]):
        for host in way["hosts"]:
            host["stats"] = 1000.0 * (1 + number)
            host["exchanged_payload"] = 500 + (1 + error) * host["stats"]
    (last,) = [v for v in wire_page.verdicts({2: figures(off)}) if "stats()" in v.goal]
    assert last.met == met
    assert last.measured.startswith(f"at worst {error:+.1%} (")
    assert "plus at most 500 bytes a step" in last.measured


def test_cycles_are_counted_in_a_timeline() -> None:
    """Horovod leaves the names of processes, and of tensors, between them."""
    timeline = """[
    {"name": "process_name", "ph": "M", "args": {"start_time_since_epoch_in_micros":5000000}},
    {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "allreduce.x"}},
    {"ph": "i", "name": "CYCLE_START", "ts": 500000, "s": "g"},{"ph": "E", "ts": 600000, "pid": 1},
    {"ph": "i", "name": "CYCLE_START", "ts": 1000000, "s": "g"}]"""
    assert wire_rank.starts_in(timeline) == [5.5, 6.0]


def test_negotiation_is_that_of_as_many_idle_cycles() -> None:
    active, idle = Sent(100, 10_000), Sent(10, 1_000)
    told = wire_rank.beyond_negotiation(active, idle, cycles=(30, 20), steps=2)
    assert told["cycles"] == 15
    assert told["exchanged_bytes"] == (10_000 - 1.5 * 1_000) / 2
    assert told["exchanged_payload"] == told["exchanged_bytes"] - 66 * (100 - 1.5 * 10) / 2


def test_nodes_are_exchanged_between_where_there_are_some() -> None:
    assert not [way for way in ways() if way.exchange == "hierarchical"]
    assert len([way for way in ways(slots=2) if way.exchange == "hierarchical"]) == 6
