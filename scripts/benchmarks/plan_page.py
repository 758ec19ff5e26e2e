"""Figures and the picture of docs/network.md: planned steps of each cell beside the measured ones.

The constants of the plan are fitted on other cells.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.plan import DENSE, FITTED, GUESSED, NONE, STRATEGIES, Cell, Exchange
from cluster import Link
from horovod_topk.cli.canvas import canvas
from horovod_topk.cli.models import specs_of
from horovod_topk.core.plan.nodes import Nodes
from horovod_topk.cost.collective_cost import CollectiveCost
from horovod_topk.cost.fit import Sample, fit
from horovod_topk.cost.machine import Kernels, Machine
from horovod_topk.cost.step import Training, step
from horovod_topk.cost.strategies import Strategy, compressed, dense
from horovod_topk.cost.traffic import nodes_of
from horovod_topk.methods.topk import TopK
from pages import RESULTS, Values
from pages.markdown import table

Job = dict[str, Any]  # what a cell's ranks found, and where


@dataclass(frozen=True)
class Row:
    """A step with one exchange on one cell."""

    cell: Cell
    strategy: str
    planned: float  # seconds, without overlap
    overlapped: float  # seconds, planned with overlap
    repeats: tuple[float, ...]

    @property
    def measured(self) -> float:
        """Return the median of all repeats."""
        return statistics.median(self.repeats)

    @property
    def error(self) -> float:
        """Return the error of the plan without overlap, as a share of the measured time."""
        return self.off(self.planned)

    def off(self, planned: float) -> float:
        """Return the difference to the measured time, as a share of it."""
        return abs(planned - self.measured) / self.measured

    @property
    def spread(self) -> float:
        """Noise: the time from the fastest repeat to the slowest, over their median."""
        return (max(self.repeats) - min(self.repeats)) / self.measured


def rows(jobs: Mapping[str, Job]) -> list[Row]:
    """Rows of all measured cells."""
    machine = machine_of([jobs[cell.name] for cell in FITTED])
    measured = [cell for cell in GUESSED if cell.name in jobs]
    return [row for cell in measured for row in guesses(machine, cell, jobs[cell.name])]


def machine_of(jobs: Sequence[Job]) -> Machine:
    """Constants, fitted on the cells for fitting."""
    cores = float(jobs[0]["machine"]["cores"])
    samples = [
        Sample(CollectiveCost(**collective), took, max(1.0, cell.hosts / cores), _rate(cell))
        for cell, job in zip(FITTED, jobs, strict=True)
        for collective, took in job["samples"]
    ]
    each = [Kernels(**job["kernels"]) for job in jobs]
    names = Kernels.__dataclass_fields__
    kernels = Kernels(**{name: min(getattr(k, name) for k in each) for name in names})
    cells = ", ".join(f"{cell.hosts} hosts at {cell.rate}" for cell in FITTED)
    where = f"{jobs[0]['machine']['cpu']}, {time.strftime('%Y-%m-%d')}"
    origin = f"fitted by make plan-grid on {cells}, {where}"
    return Machine(fit(samples), kernels, cores, origin=origin)


def guesses(machine: Machine, cell: Cell, job: Job) -> Iterator[Row]:
    """Yield a row for each exchange."""
    assert cell.model is not None
    nodes = nodes_of(cell.hosts, 1)
    network = replace(machine.network, bandwidth=_rate(cell))
    there = replace(machine, network=network, crowd=cell.hosts)
    training = Training(statistics.median(job["repeats"][NONE.name]))
    for exchange in STRATEGIES[1:]:
        strategy = _way(cell.model, exchange, nodes)
        planned, overlapped = (
            step(strategy, there, training, overlap=overlap).seconds for overlap in (False, True)
        )
        repeats = tuple(job["repeats"][exchange.name])
        yield Row(cell, exchange.name, planned, overlapped, repeats)


def _rate(cell: Cell) -> float:
    rate = Link.of(cell.rate).rate
    assert rate is not None
    return rate


def _way(model: str, exchange: Exchange, nodes: Nodes) -> Strategy:
    specs = specs_of(model)
    if exchange == DENSE:
        return dense(specs, nodes)
    return compressed(specs, nodes, exchange.exchange, TopK(ratio=0.01, **asdict(exchange)))


BAND = 0.30  # of the picture, to either side
PLANS: dict[str, Callable[[Row], float]] = {
    "without overlap": lambda row: row.planned,
    "with overlap": lambda row: row.overlapped,
}


def values(jobs: Mapping[str, Job]) -> Values:
    """Return the figures that the page shows, by name."""
    found = rows(jobs)
    return {
        "errors": errors(found),
        "steps": len(found),
        "off": f"{statistics.median(row.off(row.overlapped) for row in found):.0%}",
        "noise": noise(found),
        "picture": partial(draw, found, RESULTS / "plan-grid.png"),
        **totals(found),
    }


def errors(found: Sequence[Row]) -> str:
    """How far the plan is off, without and with overlap, and the noise floor."""
    groups = {
        strategy.name: [row for row in found if row.strategy == strategy.name]
        for strategy in STRATEGIES[1:]
    }
    lines = [
        _errors(plan, name, each, [seconds(row) for row in each])
        for plan, seconds in PLANS.items()
        for name, each in (*groups.items(), ("all", found))
    ]
    header = ["plan", "exchange", "steps", "median error", "90th percentile", "largest"]
    header += ["planned / measured, median"]
    return table(header, lines)


def _errors(plan: str, name: str, found: Sequence[Row], planned: Sequence[float]) -> list[str]:
    """planned: seconds, one a row."""
    pairs = list(zip(found, planned, strict=True))
    ascending = sorted(row.off(seconds) for row, seconds in pairs)
    median, tenth = statistics.median(ascending), percentile(ascending, 0.9)
    parts = statistics.median(seconds / row.measured for row, seconds in pairs)
    shares = [f"{share:.0%}" for share in (median, tenth, ascending[-1])]
    return [plan, name, str(len(found)), *shares, f"{parts:.2f}"]


def percentile(ascending: Sequence[float], share: float) -> float:
    """By nearest rank: the least value that this share of all values does not exceed."""
    return ascending[math.ceil(share * len(ascending)) - 1]


def draw(found: Sequence[Row], path: Path) -> str:
    """Planned against measured steps of all cells, a colour for each exchange."""
    with canvas(path, width=6.5) as axes:
        for strategy in STRATEGIES[1:]:
            mine = [row for row in found if row.strategy == strategy.name]
            axes.plot(
                [row.measured for row in mine],
                [row.planned for row in mine],
                "o",
                ms=4,
                alpha=0.7,
                label=strategy.name,
            )
        ends = [min(row.measured for row in found), max(row.measured for row in found)]
        axes.plot(ends, ends, color="#888888", linewidth=1, zorder=0)
        below, above = [(1 - BAND) * end for end in ends], [(1 + BAND) * end for end in ends]
        axes.fill_between(ends, below, above, color="#888888", alpha=0.15, linewidth=0)
        axes.set(xscale="log", yscale="log", xlabel="measured, seconds a step", ylabel="planned")
        axes.set_title(f"{len(found)} steps; the band is {BAND:.0%} wide to either side")
        axes.legend(frameon=False, fontsize=8)
    return "![Planned against measured](results/plan-grid.png)"


@dataclass(frozen=True)
class Verdict:
    """Planned and measured, on one cell."""

    cell: Cell
    planned: str  # the fastest exchange of TopKEF, as planned
    measured: str  # and as measured
    planned_gain: float  # dense's step over the fastest exchange's: above 1, compress
    measured_gain: float

    @property
    def agrees(self) -> bool:
        """Whether both say "compress", or both say "do not"."""
        return (self.planned_gain > 1) == (self.measured_gain > 1)

    @property
    def same_exchange(self) -> bool:
        """Whether plan and measurement name the same fastest exchange."""
        return self.planned == self.measured


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """One for each cell, in the order of the rows; rows of a cell must follow each other."""
    cells = groupby(rows, key=lambda row: row.cell)
    return [_verdict(cell, list(of_it)) for cell, of_it in cells]


def _verdict(cell: Cell, rows: Sequence[Row]) -> Verdict:
    dense = next(row for row in rows if row.strategy == DENSE.name)
    ours = [row for row in rows if row is not dense]
    planned = min(ours, key=lambda row: row.planned)
    measured = min(ours, key=lambda row: row.measured)
    return Verdict(
        cell,
        planned.strategy,
        measured.strategy,
        dense.planned / planned.planned,
        dense.measured / measured.measured,
    )


def totals(rows: Sequence[Row]) -> Values:
    """How often the plan is right, and how often a constant answer would be."""
    found = verdicts(rows)
    overlapped = verdicts([replace(row, planned=row.overlapped) for row in rows])
    gains = [each.measured_gain for each in found]
    ((favourite, favoured),) = Counter(each.measured for each in found).most_common(1)
    return {
        "cells": len(found),
        "agree": sum(each.agrees for each in found),
        "overlapped": sum(each.agrees for each in overlapped),
        "paid": sum(gain > 1 for gain in gains),
        "least": min(gains),
        "most": max(gains),
        "named": sum(each.same_exchange for each in found),
        "named_overlapped": sum(each.same_exchange for each in overlapped),
        "favourite": favourite,
        "favoured": favoured,
    }


def noise(rows: Sequence[Row]) -> str:
    """The noise floor, in words."""
    spreads = [row.spread for row in rows]
    return (
        "Noise: from the fastest to the slowest repeat of one exchange on one cell, the time "
        f"differs by {statistics.median(spreads):.0%} of its median in the median case, and by "
        f"{max(spreads):.0%} in the worst."
    )
