"""How often `plan` is right about whether to compress, and how far measured steps can be trusted.

Plan and measurement each have a verdict on a cell: compress, if the fastest of our ways that were
measured takes less than dense. A measured verdict is clear if even the slowest repeat of the one
was faster than the fastest repeat of the other: where they overlap, another measurement may say
otherwise, and no plan can be right but by luck.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from planning.grid import Cell
from planning.guesses import Row
from planning.ways import DENSE
from study.markdown import table


@dataclass(frozen=True)
class Verdict:
    """Of one cell."""

    cell: Cell
    planned: str  # our fastest way, as planned
    measured: str  # and as measured
    planned_gain: float  # dense's step over that of our fastest way: above 1, compress
    measured_gain: float
    clear: bool  # whether repeats tell dense and ours apart

    @property
    def agrees(self) -> bool:
        """Whether both say "compress", or both say "do not"."""
        return (self.planned_gain > 1) == (self.measured_gain > 1)

    @property
    def same_way(self) -> bool:
        """Whether the same one of ours is the fastest."""
        return self.planned == self.measured


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Of each cell, in the order of the rows, where a cell's follow each other."""
    cells = groupby(rows, key=lambda row: row.cell)
    return [_verdict(cell, list(of_it)) for cell, of_it in cells]


def _verdict(cell: Cell, rows: Sequence[Row]) -> Verdict:
    dense = next(row for row in rows if row.way == DENSE.name)
    ours = [row for row in rows if row is not dense]
    planned = min(ours, key=lambda row: row.planned)
    measured = min(ours, key=lambda row: row.measured)
    return Verdict(
        cell,
        planned.way,
        measured.way,
        dense.planned / planned.planned,
        dense.measured / measured.measured,
        _tells_apart(dense.repeats, measured.repeats),
    )


def _tells_apart(left: Sequence[float], right: Sequence[float]) -> bool:
    return max(left) < min(right) or max(right) < min(left)


def section(rows: Sequence[Row]) -> str:
    """The totals in words, and a table, a line a cell."""
    header = ["hosts", "link", "model", "planned: times faster", "measured", "verdict"]
    header += ["repeats tell", "fastest of ours: planned", "measured"]
    found = verdicts(rows)
    return "\n".join([*_totals(found), "", table(header, map(_line, found))])


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


def _totals(found: Sequence[Verdict]) -> Iterable[str]:
    agree = sum(each.agrees for each in found)
    clear = [each for each in found if each.clear]
    yield (
        f"Whether to compress was planned as measured in {agree} of {len(found)} cells "
        f"({agree / len(found):.0%}; 95% wanted), and which of ours is the fastest in "
        f"{sum(each.same_way for each in found)}."
    )
    yield (
        f"Repeats tell dense and ours apart in {len(clear)} cells, and in "
        f"{sum(each.agrees for each in clear)} of these the verdict agrees."
    )


def noise(rows: Sequence[Row]) -> str:
    """The noise floor, in words."""
    spreads = [row.spread for row in rows]
    return (
        f"Noise floor: repeats of one way on one cell spread over {statistics.median(spreads):.0%} "
        f"of their median in the middle case, and over {max(spreads):.0%} in the worst."
    )
