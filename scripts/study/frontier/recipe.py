"""The tables on `TopKEF.compact()`: runs of different length, and runs without one of its parts."""

from __future__ import annotations

import math
from dataclasses import replace

from study.frontier import agenda, patience, records
from study.frontier.agenda import PLAIN, RECIPE, Point, Series
from study.frontier.cells import RANKS, dense
from study.markdown import OPTIMIZERS, spread, table

TEXT = """\
## `TopKEF.compact()`

`TopKEF.compact()` on the byte GPT, equal shards, {ranks} simulated ranks: 4-bit values, ratio
{ratio:g}, and momentum correction in place of SGD's momentum or AdamW's first moment. "Uncorrected"
is the same without momentum correction. All runs use dense's best learning rate at {swept:,} steps.
The table has dense's bits a byte and how many more the others need, seed by seed.

{table}"""


ABLATIONS = """\
### What each part is good for

The byte GPT, equal shards, {steps:,} steps, one seed: how many more bits a byte than dense.
Without masking, the velocity of an element is kept when the element is sent.

{table}"""


def section() -> str:
    """Markdown; empty before there is a run."""
    rows = [row for series in (agenda.BYTELM, agenda.BYTELM_ADAMW) for row in _rows(series)]
    if not rows:
        return ""
    header = ["optimizer", "steps", "dense", "uncorrected", "`compact()`", "seeds"]
    made = table(header, rows)
    text = TEXT.format(ranks=RANKS, ratio=RECIPE.ratio, swept=agenda.BYTELM.steps, table=made)
    return "\n\n".join(filter(None, [text, patience.section(), _ablations()]))


def _ablations() -> str:
    """A row a variant, a column an optimizer."""
    known, rows = records.finished(), dict[str, list[str]]()
    for name, cell in agenda.ablations():
        common = (cell.workload, cell.optimizer, cell.shards, cell.lr, cell.steps, cell.seed)
        runs = [known.get(each) for each in (cell, dense(*common))]
        rows.setdefault(name, [name]).append(_difference(*runs))
    header = ["", *(OPTIMIZERS[each.optimizer] for each in (agenda.BYTELM, agenda.BYTELM_ADAMW))]
    return ABLATIONS.format(steps=agenda.BYTELM.steps, table=table(header, rows.values()))


def _difference(run: records.Record | None, beside: records.Record | None) -> str:
    if run is None or beside is None:
        return "not run"
    score, others = records.score(run), records.score(beside)
    return "diverged" if not score or not others else f"{100 * (score / others - 1):+.2f}%"


def _rows(series: Series) -> list[list[str]]:
    lr = agenda.chosen(series)
    if lr is None:
        return []
    return [
        row for steps in agenda.lengths(series) if (row := _row(replace(series, steps=steps), lr))
    ]


def _row(series: Series, lr: float) -> list[str]:
    """Seeds that have all three."""
    known = records.finished()

    def score(cell: agenda.Cell) -> float:
        found = records.score(known[cell]) if cell in known else math.nan
        return math.inf if found is None else found

    def cost(point: Point, seed: int) -> float:
        return 100 * (score(series.at(point, "equal", lr, seed)) / plainly[seed] - 1)

    plainly = {seed: score(series.dense("equal", lr, seed)) for seed in series.seeds}
    seeds = [
        s for s in plainly if not math.isnan(cost(PLAIN, s)) and not math.isnan(cost(RECIPE, s))
    ]
    if not seeds:
        return []
    plain, recipe = ([cost(point, seed) for seed in seeds] for point in (PLAIN, RECIPE))
    return [
        OPTIMIZERS[series.optimizer],
        f"{series.steps:,}",
        ", ".join(f"{plainly[seed]:.4f}" for seed in seeds),
        _percent(plain),
        _percent(recipe),
        ", ".join(map(str, seeds)),
    ]


def _percent(costs: list[float]) -> str:
    if math.isinf(max(costs)):
        return "diverged"
    return spread(costs, "+", "%")
