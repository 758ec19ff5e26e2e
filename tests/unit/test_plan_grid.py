"""The plan's verdicts against measured ones, on cells that were recorded and on invented ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import launch
import plan_grid
from planning import agreement

RECORDED = json.loads((launch.ROOT / "docs" / "results" / "plan-cells.json").read_text())


def rows(*ways: tuple[str, float, float, list[float]], hosts: int = 2) -> list[dict[str, Any]]:
    """Of one cell: way, planned and measured seconds, repeats."""
    cell = {"hosts": hosts, "rate": 10**9, "model": "resnet18", "error": 0.0}
    return [
        {**cell, "way": way, "planned": planned, "measured": measured, "repeats": repeats}
        for way, planned, measured, repeats in ways
    ]


PAYS = rows(
    ("allreduce float32", 2.0, 3.0, [2.9, 3.0, 3.1]),
    ("allgather float32", 1.0, 1.5, [1.4, 1.5, 1.6]),
)
WRONG = rows(
    ("allreduce float32", 2.0, 1.0, [0.9, 1.0, 1.1]), ("sharded int8", 1.0, 2.0, [1.9, 2.0, 2.2])
)
NOISE = rows(
    ("allreduce float32", 2.0, 1.0, [0.5, 1.0, 2.0]),
    ("sharded int8", 1.0, 1.1, [1.0, 1.1, 1.2]),
    ("allgather float32", 1.5, 1.05, [1.0, 1.05, 1.2]),
    hosts=4,
)


def test_recorded_cells() -> None:
    machine = plan_grid.machine_of(RECORDED["fit"])
    found = [row for job in RECORDED["guess"] for row in plan_grid.guesses(machine, job)]
    for row, before in zip(found, RECORDED["rows"], strict=True):
        assert row["way"] == before["way"]
        assert row["measured"] == before["measured"]
    first, second = agreement.verdicts(found)
    assert (first.hosts, first.rate, first.model) == (2, 100_000_000, "resnet18")
    assert first.agrees
    assert second.agrees
    assert first.measured_gain == pytest.approx(4.7370 / 0.2530, rel=1e-3)
    assert first.measured.startswith("sharded")


def test_a_percentile_is_one_of_what_was_measured() -> None:
    """Of six errors the fifth is exceeded by a sixth of all, which is more than a tenth."""
    assert plan_grid.percentile([9, 10, 10, 16, 31, 69], 0.9) == 69
    assert plan_grid.percentile(list(range(1, 11)), 0.9) == 9
    assert plan_grid.percentile([5], 0.9) == 5


def test_a_verdict_is_whether_the_fastest_of_ours_beats_dense() -> None:
    pays, wrong, noise = (agreement.verdicts(cell)[0] for cell in (PAYS, WRONG, NOISE))
    assert (pays.agrees, wrong.agrees, noise.agrees) == (True, False, False)
    assert (pays.clear, wrong.clear, noise.clear) == (True, True, False)
    assert (pays.planned_gain, pays.measured_gain) == (2.0, 2.0)
    assert (noise.planned, noise.measured) == ("sharded int8", "allgather float32")
    assert not noise.same_way


def test_totals_count_cells_and_clear_ones() -> None:
    found = agreement.summary([*PAYS, *NOISE])
    assert (found["cells"], found["agree"], found["same_way"]) == (2, 1, 1)
    assert (found["clear"], found["agree_of_clear"]) == (1, 1)
    assert found["largest_spread"] == pytest.approx(1.5)


def test_without_repeats_nothing_is_said_of_noise() -> None:
    bare = [{key: each for key, each in row.items() if key != "repeats"} for row in PAYS]
    (verdict,) = agreement.verdicts(bare)
    assert verdict.clear is None
    assert agreement.summary(bare)["median_spread"] is None
    assert "Repeats were not kept" in agreement.markdown(bare)


def test_every_cell_has_a_line_and_the_page_its_place(tmp_path: Path) -> None:
    page = tmp_path / "plan.md"
    page.write_text(f"before\n{plan_grid.BEGIN}\nold\n{plan_grid.END}\nafter\n")
    plan_grid.publish([*PAYS, *NOISE], page)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert text.count("| 2 | 1000 | resnet18 | 2.00 | 2.00 | agrees | yes |") == 1
    assert "no, within noise" in text
    assert "in 1 of 2 cells" in text.replace("\n", " ")
    plan_grid.publish([*PAYS, *NOISE], page)
    assert page.read_text() == text


def test_what_is_kept_can_be_read_again(tmp_path: Path) -> None:
    path = tmp_path / "grid.json"
    plan_grid.write(path, RECORDED["fit"], RECORDED["guess"], [*PAYS, *NOISE])
    kept = json.loads(path.read_text())
    assert [each["agrees"] for each in kept["verdicts"]] == [True, False]
    assert kept["summary"]["cells"] == 2
