"""How many steps a setting needs to end where dense ends."""

from __future__ import annotations

import math
from dataclasses import replace

from study.frontier import agenda, records
from study.frontier.agenda import PLAIN, RECIPE, Point, Series
from study.markdown import OPTIMIZERS, table

TEXT = """\
### Steps to dense's final score

How many steps a run needs to end with the score of a dense run, one value for each of the two
seeds. Final scores between two lengths are interpolated over the logarithm of steps.

{table}"""

Ends = dict[int, float]  # final scores, less is better, by the length of the run in steps


def section() -> str:
    """Markdown; empty before there is a seed with all runs."""
    rows = [row for series in (agenda.BYTELM, agenda.BYTELM_ADAMW) for row in _rows(series)]
    header = ["optimizer", "steps, dense", "uncorrected", "`compact()`"]
    return TEXT.format(table=table(header, rows)) if rows else ""


def needed(ends: Ends, goal: float) -> float:
    """Steps after which a run of that length ends at the goal; inf: more than were tried.

    Never less than the shortest length tried.
    """
    before: tuple[int, float] | None = None
    for steps, score in sorted(ends.items()):
        if score <= goal:
            if before is None:
                return steps
            share = (before[1] - goal) / (before[1] - score)
            return before[0] * (steps / before[0]) ** share
        before = steps, score
    return math.inf


def _rows(series: Series) -> list[list[str]]:
    """A row for each length of a dense run."""
    found = [
        each
        for seed in series.seeds
        if all(each := [_ends(series, point, seed) for point in (None, PLAIN, RECIPE)])
    ]
    return [
        [
            OPTIMIZERS[series.optimizer],
            f"{steps:,}",
            *(_steps([needed(ways[way], ways[0][steps]) for ways in found]) for way in (1, 2)),
        ]
        for steps in (agenda.lengths(series) if found else ())
    ]


def _ends(series: Series, point: Point | None, seed: int) -> Ends:
    """A setting's runs, dense's for None; empty unless there is one of every length."""
    known, lr, ends = records.finished(), agenda.chosen(series), Ends()
    for steps in agenda.lengths(series) if lr is not None else ():
        of = replace(series, steps=steps)
        cell = of.at(point, "equal", lr, seed) if point else of.dense("equal", lr, seed)
        score = records.score(known[cell]) if cell in known else None
        if score is None:
            return {}
        ends[steps] = score
    return ends


def _steps(found: list[float]) -> str:
    over = f"over {max(agenda.RECIPE_STEPS):,}"
    return " and ".join(over if math.isinf(each) else f"{round(each, -1):,.0f}" for each in found)
