"""Pages of studies: every figure comes from docs/results, and results fit their settings."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from study import page
from study.markdown import spread
from study.results import RESULTS, Study

# Each with the fewest runs that it can have.
STUDIES = {"accuracy": 101, "default": 101, "frontier": 101, "practice": 101, "methods": 40}


def test_one_or_two_seeds_are_written_as_they_are() -> None:
    assert spread([5.731], "+", "%") == "+5.73%"
    assert spread([0.88, -0.69], "+", "%") == "+0.88%, -0.69%"
    assert spread([-0.001, 0.5], "+") == "+0.00, +0.50"


@pytest.mark.parametrize("values", [[1.0, 2.0, 3.0], [3.0, 1.0, 2.0]])
def test_three_seeds_are_a_mean_with_its_standard_error(values: list[float]) -> None:
    assert spread(values, unit="%") == "2.00 ± 0.58%"


@pytest.fixture(scope="module", params=STUDIES)
def study(request: pytest.FixtureRequest) -> Study:
    return Study(request.param)


@pytest.mark.parametrize("name", [*STUDIES, "parts", "unseen"])
def test_every_result_belongs_to_a_setting(name: str) -> None:
    """Otherwise a run would be made again, and its old result would be on no page.

    Runs with settings that are no settings any more are kept, and on no page.
    """
    lines = (RESULTS / f"{name}.jsonl").read_text().splitlines()
    lines = [each for each in lines if "velocity_kept" not in each and "='optimizer'" not in each]
    assert len(list(Study(name).runs())) == len(lines) >= STUDIES.get(name, 40)


def test_the_page_is_that_of_the_results(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("scatter", "curves", "bars", "dots", "panels"):
        monkeypatch.setattr(page.pictures, name, lambda *_: None)
    template = Path(page.__file__).with_name(f"{study.name}.md").read_text()
    assert (RESULTS.parent / f"{study.name}.md").read_text() == page.made(study, template)


@pytest.mark.parametrize("path", ["README.md", "docs/choosing.md"])
def test_pages_repeat_the_table_of_the_default(path: str) -> None:
    pages = RESULTS.parent
    found = re.search(r"## In short.*?\n(\|.*?)\n\n", (pages / "default.md").read_text(), re.DOTALL)
    assert found
    assert found[1] in (pages.parent / path).read_text()


def test_a_figure_that_is_not_there_is_an_error(study: Study) -> None:
    with pytest.raises(ValueError, match="write one of"):
        page.made(study, "so much: {{diference | x}}")
    with pytest.raises(ValueError, match="no case matches"):
        page.made(study, "so much: {{dense | x}}")


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
