"""Figures and the picture of docs/plan-grid.md, from the stored results."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path

from benchmarks.plan import CELLS, DENSE, FITTED, LEAST, MOST, SETTLED, STRATEGIES, Cell
from benchmarks.plan_guesses import Job, Row, machine_of, rows
from horovod_topk.cli.canvas import canvas
from horovod_topk.cost.machine import Machine, Network
from horovod_topk.cost.quantities import milliseconds
from pages import RESULTS, Values
from pages.markdown import table

MEDIAN, TENTH = 0.15, 0.30  # wanted errors: the median, and the 90th percentile
PLANS: dict[str, Callable[[Row], float]] = {
    "without overlap": lambda row: row.planned,
    "with overlap": lambda row: row.overlapped,
}


def values(jobs: Mapping[str, Job]) -> Values:
    """The page's figures by name."""
    found = rows(jobs)
    machine = machine_of([jobs[cell.name] for cell in FITTED])
    return {
        "fitted": "; ".join(f"{cell.hosts} hosts at {cell.rate}" for cell in FITTED),
        "least": LEAST,
        "most": MOST,
        "settled": SETTLED,
        "machine": _machine(jobs, machine),
        "errors": errors(found),
        "verdicts": section(found),
        "all_cells": cells(found),
        "picture": partial(draw, found, RESULTS / "plan-grid.png"),
        **totals(found),
    }


def _machine(jobs: Mapping[str, Job], machine: Machine) -> str:
    each = [job["machine"] for job in jobs.values()]
    lines = [
        f"{one['cpu']}, {one['cores']} cores, Python {one['python']}, PyTorch {one['torch']}, "
        f"Horovod {one['horovod']} on Gloo."
        for one in each
    ]
    lines = list(dict.fromkeys(lines))
    days = sorted({one["date"] for one in each})
    lines.append(f"{len(jobs)} of {len(CELLS)} cells, {' to '.join(days[:1] + days[1:][-1:])}.")
    lines.append(_constants(machine.network))
    return "\n".join(lines)


def _constants(network: Network) -> str:
    return (
        f"Fitted constants: goodput {network.goodput:.1%} of a link's rate, "
        f"{milliseconds(network.latency)} ms a message, {milliseconds(network.overhead)} ms a "
        f"collective, {1e9 * network.copy:.3g} ns a byte sent, {1e9 * network.add:.3g} ns a byte "
        "added."
    )


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
    header = ["plan", "exchange", "steps", f"median error ({MEDIAN:.0%} wanted)"]
    header += [f"90th percentile ({TENTH:.0%} wanted)", "largest", "planned / measured, median"]
    return f"{table(header, lines)}\n\n{noise(found)}"


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


def cells(found: Iterable[Row]) -> str:
    """Every step that was measured."""
    header = ["hosts", "link", "model", "exchange", "measured, s", "repeats spread over"]
    return table([*header, "planned, s", "error"], map(_cell, found))


def _cell(row: Row) -> list[str]:
    return [
        str(row.cell.hosts),
        row.cell.rate,
        row.cell.model or "",
        row.strategy,
        f"{row.measured:.3f}",
        f"{row.spread:.0%}",
        f"{row.planned:.3f}",
        f"{row.error:.0%}",
    ]


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
        below, above = [(1 - TENTH) * end for end in ends], [(1 + TENTH) * end for end in ends]
        axes.fill_between(ends, below, above, color="#888888", alpha=0.15, linewidth=0)
        axes.set(xscale="log", yscale="log", xlabel="measured, seconds a step", ylabel="planned")
        axes.set_title(f"{len(found)} steps; the band is {TENTH:.0%} wide to either side")
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
    clear: bool  # whether repeats tell dense and ours apart

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
        _tells_apart(dense.repeats, measured.repeats),
    )


def _tells_apart(left: Sequence[float], right: Sequence[float]) -> bool:
    return max(left) < min(right) or max(right) < min(left)


def section(rows: Sequence[Row]) -> str:
    """A table with a line a cell."""
    header = ["hosts", "link", "model", "planned: times faster", "measured", "verdict"]
    header += ["repeats tell", "fastest exchange: planned", "measured"]
    return table(header, map(_line, verdicts(rows)))


def _line(verdict: Verdict) -> list[str]:
    return [
        str(verdict.cell.hosts),
        verdict.cell.rate,
        verdict.cell.model or "",
        f"{verdict.planned_gain:.2f}",
        f"{verdict.measured_gain:.2f}",
        "agrees" if verdict.agrees else "**differs**",
        "yes" if verdict.clear else "no, within noise",
        verdict.planned,
        verdict.measured,
    ]


EASY = """\
But compression paid in every cell: the smallest measured speed-up was {least:.1f}. A constant
"compress" scores the same, so these cells cannot show whether the plan knows when compression
does not pay."""
HARD = 'A constant "compress" is right in {paid}.'


def totals(rows: Sequence[Row]) -> Values:
    """How often the plan is right, and how often a constant answer would be."""
    found = verdicts(rows)
    overlapped = verdicts([replace(row, planned=row.overlapped) for row in rows])
    clear = [each for each in found if each.clear]
    gains = [each.measured_gain for each in found]
    ((favourite, favoured),) = Counter(each.measured for each in found).most_common(1)
    constant = EASY if min(gains) > 1 else HARD
    return {
        "agree": sum(each.agrees for each in found),
        "cells": len(found),
        "share": sum(each.agrees for each in found) / len(found),
        "overlapped": sum(each.agrees for each in overlapped),
        "constant": constant.format(least=min(gains), paid=sum(gain > 1 for gain in gains)),
        "clear": len(clear),
        "right": sum(each.agrees for each in clear),
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
