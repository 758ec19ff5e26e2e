"""The plan against measured steps: on invented cells, where what is right is known."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plan_page
from benchmarks.plan import CELLS, FITTED, GUESSED, NONE, STRATEGIES, Cell
from benchmarks.plan_page import Row, guesses, machine_of, rows
from horovod_topk.cli.plan.measure import gathered
from horovod_topk.cost.collective_cost import ring_allreduce
from horovod_topk.cost.machine import Kernels, Machine, Network
from horovod_topk.cost.traffic import nodes_of

pytestmark = pytest.mark.tools

CELL = Cell(2, "1gbit", "resnet18")
NETWORK = Network(1e9, latency=2e-4, overhead=1.5e-3, goodput=0.9, copy=2e-10, add=3e-10)
KERNELS = Kernels(encode=4e-10, clear=1e-10, decode=2e-9, multiply=5e-10, triad=3e-10)
MACHINE = Machine(NETWORK, KERNELS, cores=2.0)
VERSIONS = {"python": "3.11", "torch": "2", "horovod": "0.28"}
THERE = {"cpu": "a processor", "cores": 2, **VERSIONS, "date": "2026-11-22"}


def fitted(cell: Cell) -> dict[str, Any]:
    """What ranks would find on a network of which `NETWORK` is the truth."""
    nodes, slow = nodes_of(cell.hosts, 1), max(1.0, cell.hosts / 2)
    network = replace(NETWORK, bandwidth={"200mbit": 2e8, "600mbit": 6e8}[cell.rate])
    sent = [ring_allreduce(size, nodes) for size in (4, 100_000, 10_000_000)]
    sent += [gathered(size, nodes) for size in (64, 100_000, 4_000_000)]
    samples = [(asdict(each), each.seconds(network, slow)) for each in sent]
    return {"kernels": asdict(KERNELS), "samples": samples, "machine": THERE}


def guessed(cell: Cell, factor: float = 1.0) -> dict[str, Any]:
    """Steps that take so many times as long as planned."""
    empty = {NONE.name: [0.1], **{strategy.name: [1.0] for strategy in STRATEGIES[1:]}}
    planned = guesses(MACHINE, cell, {"repeats": empty})
    found = {
        row.strategy: [factor * row.planned * noise for noise in (0.9, 1.0, 1.1)] for row in planned
    }
    return {"repeats": {NONE.name: [0.1], **found}, "machine": THERE}


JOBS = {cell.name: fitted(cell) for cell in FITTED}


def of_a_cell(*strategies: tuple[str, float, list[float]], cell: Cell = CELL) -> list[Row]:
    """Strategy, planned seconds, repeats."""
    return [
        Row(cell, strategy, planned, planned / 2, tuple(repeats))
        for strategy, planned, repeats in strategies
    ]


PAYS = of_a_cell(
    ("allreduce float32", 2.0, [2.9, 3.0, 3.1]), ("allgather float32", 1.0, [1.4, 1.5, 1.6])
)
WRONG = of_a_cell(
    ("allreduce float32", 2.0, [0.9, 1.0, 1.1]), ("sharded int8", 1.0, [1.9, 2.0, 2.2])
)
NOISE = of_a_cell(
    ("allreduce float32", 2.0, [0.5, 1.0, 2.0]),
    ("sharded int8", 1.0, [1.0, 1.1, 1.2]),
    ("allgather float32", 1.5, [1.0, 1.05, 1.2]),
    cell=replace(CELL, hosts=4),
)


def test_no_cell_is_both_fitted_on_and_guessed() -> None:
    assert not {(each.hosts, each.rate) for each in FITTED} & {
        (each.hosts, each.rate) for each in GUESSED
    }
    assert len(GUESSED) == len(set(GUESSED)) == 3 * 3 * 4
    assert len(CELLS) == len(FITTED) + len(GUESSED)


def test_constants_come_from_the_cells_to_fit_on() -> None:
    machine = machine_of([JOBS[cell.name] for cell in FITTED])
    for name in ("latency", "overhead", "goodput", "copy", "add"):
        assert getattr(machine.network, name) == pytest.approx(getattr(NETWORK, name), rel=1e-3)
    assert (machine.kernels, machine.cores) == (KERNELS, 2.0)


@pytest.mark.parametrize("cell", [CELL, Cell(8, "100mbit", "resnet50")])
def test_steps_as_planned_have_no_error_and_others_have(cell: Cell) -> None:
    right = rows({**JOBS, cell.name: guessed(cell)})
    assert [row.strategy for row in right] == [strategy.name for strategy in STRATEGIES[1:]]
    assert max(row.error for row in right) < 1e-3
    twice = rows({**JOBS, cell.name: guessed(cell, factor=2.0)})
    assert [row.error for row in twice] == pytest.approx([0.5] * 3, rel=1e-3)
    assert twice[0].spread == pytest.approx(0.2)


def test_a_percentile_is_one_of_what_was_measured() -> None:
    """Of six errors the fifth is exceeded by a sixth of all, which is more than a tenth."""
    assert plan_page.percentile([9, 10, 10, 16, 31, 69], 0.9) == 69
    assert plan_page.percentile(list(range(1, 11)), 0.9) == 9
    assert plan_page.percentile([5], 0.9) == 5


def test_a_verdict_is_whether_the_fastest_of_ours_beats_dense() -> None:
    pays, wrong, noise = (plan_page.verdicts(cell)[0] for cell in (PAYS, WRONG, NOISE))
    assert (pays.agrees, wrong.agrees, noise.agrees) == (True, False, False)
    assert (pays.planned_gain, pays.measured_gain) == (2.0, 2.0)
    assert (noise.planned, noise.measured) == ("sharded int8", "allgather float32")
    assert not noise.same_exchange


def test_totals_count_cells() -> None:
    found = plan_page.totals([*PAYS, *NOISE])
    assert (found["agree"], found["cells"], found["paid"]) == (1, 2, 1)
    assert "by 150% in the worst" in plan_page.noise([*PAYS, *NOISE])


def test_figures_of_some_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_page, "RESULTS", tmp_path)
    values = plan_page.values({**JOBS, CELL.name: guessed(CELL)})
    assert "| without overlap | all | 3 | 0% | 0% | 0% | 1.00 |" in values["errors"]
    assert "| with overlap | all | 3 |" in values["errors"]
    assert "| with overlap | all | 3 | 0% " not in values["errors"]
    assert values["picture"]() and (tmp_path / "plan-grid.png").stat().st_size > 10_000
