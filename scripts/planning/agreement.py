"""How often `plan` is right about whether to compress, and how far measured steps can be trusted.

A cell is a cluster and a model. Plan and measurement each have a verdict there: compress, if the
fastest of our ways that were measured takes less than dense. A measured verdict is clear if even
the slowest repeat of the one was faster than the fastest repeat of the other: where they overlap,
another measurement may say otherwise, and no plan can be right but by luck.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from study.markdown import table

DENSE = "allreduce"  # as `horovod_topk.cost.ways` calls it
Row = dict[str, Any]  # of `plan_grid.guesses`


@dataclass(frozen=True)
class Verdict:
    """Of one cell."""

    hosts: int
    rate: int  # bits a second
    model: str
    planned: str  # our fastest way, as planned
    measured: str  # and as measured
    planned_gain: float  # dense's step over that of our fastest way: above 1, compress
    measured_gain: float
    clear: bool | None  # whether repeats tell dense and ours apart; None: there are no repeats

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
    cells = groupby(rows, key=lambda row: (row["hosts"], row["rate"], row["model"]))
    return [_verdict(*cell, list(of_it)) for cell, of_it in cells]


def _verdict(hosts: int, rate: int, model: str, rows: Sequence[Row]) -> Verdict:
    dense = next(row for row in rows if row["way"].startswith(DENSE))
    ours = [row for row in rows if row is not dense]
    planned = min(ours, key=lambda row: row["planned"])
    measured = min(ours, key=lambda row: row["measured"])
    return Verdict(
        hosts,
        rate,
        model,
        planned["way"],
        measured["way"],
        dense["planned"] / planned["planned"],
        dense["measured"] / measured["measured"],
        _tells_apart(dense.get("repeats"), measured.get("repeats")),
    )


def _tells_apart(left: Sequence[float] | None, right: Sequence[float] | None) -> bool | None:
    if not left or not right:
        return None
    return max(left) < min(right) or max(right) < min(left)


def spread(row: Row) -> float | None:
    """The noise floor of a row: from the fastest repeat to the slowest, over their median."""
    repeats = row.get("repeats")
    return (max(repeats) - min(repeats)) / statistics.median(repeats) if repeats else None


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Totals over all cells."""
    found = verdicts(rows)
    clear = [each for each in found if each.clear]
    spreads = [each for each in map(spread, rows) if each is not None]
    return {
        "cells": len(found),
        "agree": sum(each.agrees for each in found),
        "same_way": sum(each.same_way for each in found),
        "clear": len(clear) if spreads else None,
        "agree_of_clear": sum(each.agrees for each in clear) if spreads else None,
        "median_spread": statistics.median(spreads) if spreads else None,
        "largest_spread": max(spreads, default=None),
    }


def markdown(rows: Sequence[Row]) -> str:
    """A table, a line a cell, and the totals in words."""
    header = ["hosts", "Mbit/s", "model", "planned: times faster", "measured", "verdict"]
    header += ["repeats tell", "fastest of ours: planned", "measured"]
    cells = table(header, map(_line, verdicts(rows)))
    return "\n".join([cells, "", *_totals(summary(rows))])


def _line(verdict: Verdict) -> list[str]:
    tell = {None: "not kept", True: "yes", False: "no, within noise"}[verdict.clear]
    return [
        str(verdict.hosts),
        f"{verdict.rate / 1e6:g}",
        verdict.model,
        f"{verdict.planned_gain:.2f}",
        f"{verdict.measured_gain:.2f}",
        "agrees" if verdict.agrees else "**differs**",
        tell,
        verdict.planned,
        verdict.measured,
    ]


def _totals(found: dict[str, Any]) -> Iterable[str]:
    yield (
        f"Whether to compress was planned as measured in {found['agree']} of {found['cells']} "
        f"cells, and which of ours is the fastest in {found['same_way']}."
    )
    if found["median_spread"] is None:
        yield "Repeats were not kept: there is no noise floor to hold this against."
        return
    yield (
        f"Repeats tell dense and ours apart in {found['clear']} cells, and in "
        f"{found['agree_of_clear']} of these the verdict agrees. Noise floor: repeats of one way "
        f"spread over {found['median_spread']:.0%} of their median in the middle cell and way, and "
        f"over {found['largest_spread']:.0%} in the worst."
    )
