"""How often `plan` is right about whether to compress, and how noisy the measured steps are.

Plan and measurement each have a verdict on a cell: compress, if the fastest measured exchange of
TopKEF takes less time than dense. A measured verdict is clear if all repeats of the one were faster
than all repeats of the other. Where repeats overlap, another measurement may have another verdict.
"""

from __future__ import annotations

import statistics
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from planning.grid import Cell
from planning.guesses import Row
from planning.strategies import DENSE
from study.markdown import table


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


VERDICTS = """\
**How good is the verdict?** The plan's verdict (compress or not) was the measured one in {agree} of
{cells} cells without overlap ({share:.0%}; 95% wanted), and in {overlapped} with overlap.
{constant} Repeats tell dense and TopKEF apart in {clear} cells; the verdict is right in {right} of
these."""
NAMES = """\
**Which exchange?** The plan named the fastest measured exchange of TopKEF in {named} of {cells}
cells without overlap, and in {overlapped} with overlap. Always naming {favourite} is right in
{favoured}."""
EASY = """\
But compression paid in every cell: the smallest measured speed-up was {least:.1f}. A constant
"compress" scores the same, so these cells cannot show whether the plan knows when compression
does not pay."""
HARD = 'A constant "compress" is right in {paid}.'


def totals(rows: Sequence[Row]) -> str:
    """How often the plan is right, and how often a constant answer would be."""
    found = verdicts(rows)
    overlapped = verdicts([replace(row, planned=row.overlapped) for row in rows])
    clear = [each for each in found if each.clear]
    gains = [each.measured_gain for each in found]
    fastest = Counter(each.measured for each in found)
    ((favourite, favoured),) = fastest.most_common(1)
    is_easy = min(gains) > 1
    verdict = VERDICTS.format(
        agree=sum(each.agrees for each in found),
        cells=len(found),
        share=sum(each.agrees for each in found) / len(found),
        overlapped=sum(each.agrees for each in overlapped),
        constant=(EASY if is_easy else HARD).format(
            least=min(gains), paid=sum(gain > 1 for gain in gains)
        ),
        clear=len(clear),
        right=sum(each.agrees for each in clear),
    )
    names = NAMES.format(
        named=sum(each.same_exchange for each in found),
        cells=len(found),
        overlapped=sum(each.same_exchange for each in overlapped),
        favourite=favourite,
        favoured=favoured,
    )
    return "\n\n".join(textwrap.fill(each, 100) for each in (verdict, names))


def noise(rows: Sequence[Row]) -> str:
    """The noise floor, in words."""
    spreads = [row.spread for row in rows]
    return (
        "Noise: from the fastest to the slowest repeat of one exchange on one cell, the time "
        f"differs by {statistics.median(spreads):.0%} of its median in the median case, and by "
        f"{max(spreads):.0%} in the worst."
    )
