"""Figures and the picture of docs/network.md, from the stored results."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path

from benchmarks.plan import DENSE, STRATEGIES, Cell
from benchmarks.plan_guesses import Job, Row, rows
from horovod_topk.cli.canvas import canvas
from pages import RESULTS, Values
from pages.markdown import table

BAND = 0.30  # of the picture, to either side
PLANS: dict[str, Callable[[Row], float]] = {
    "without overlap": lambda row: row.planned,
    "with overlap": lambda row: row.overlapped,
}


def values(jobs: Mapping[str, Job]) -> Values:
    """The page's figures by name."""
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
