"""The recipe's table: runs of different length, without and with what it is made of."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

from study.frontier import agenda, records
from study.frontier.agenda import PLAIN, RECIPE, Point, Series
from study.markdown import OPTIMIZERS, table

TEXT = """\
## The recipe

`TopKEF.compact()` on the byte language model, equal shards: values of 4 bits, ratio {ratio:g}, and
momentum correction in the place of SGD's momentum or AdamW's first moment. Beside it the same
without momentum correction. The learning rate is dense's in all of them, from its sweep at
{swept:,} steps. Final bits a byte of dense, and how much more the others need, seed by seed; goals:
at most half of what it costs without, and under 1.5% at 8,000 steps.

{table}"""


def section() -> str:
    """Markdown; empty before there is a run."""
    rows = [row for series in (agenda.BYTELM, agenda.BYTELM_ADAMW) for row in _rows(series)]
    if not rows:
        return ""
    header = ["optimizer", "steps", "dense", "without", "compact()", "share left", "seeds"]
    made = table(header, rows)
    return TEXT.format(ratio=RECIPE.ratio, swept=agenda.BYTELM.steps, table=made)


def _rows(series: Series) -> list[list[str]]:
    lr = agenda.chosen(series)
    if lr is None:
        return []
    lengths = sorted({series.steps, *agenda.RECIPE_STEPS})
    return [row for steps in lengths if (row := _row(replace(series, steps=steps), lr))]


def _row(series: Series, lr: float) -> list[str]:
    """Seeds that have all three."""
    known = records.finished()

    def score(cell: agenda.Cell) -> float:
        found = records.score(known[cell]) if cell in known else math.nan
        return math.inf if found is None else found

    def cost(point: Point, seed: int) -> float:
        return 100 * (score(series.at(point, "equal", lr, seed)) / dense[seed] - 1)

    dense = {seed: score(series.dense("equal", lr, seed)) for seed in series.seeds}
    seeds = [s for s in dense if not math.isnan(cost(PLAIN, s)) and not math.isnan(cost(RECIPE, s))]
    if not seeds:
        return []
    plain, recipe = ([cost(point, seed) for seed in seeds] for point in (PLAIN, RECIPE))
    share = statistics.mean(recipe) / statistics.mean(plain)
    return [
        OPTIMIZERS[series.optimizer],
        f"{series.steps:,}",
        f"{statistics.mean(dense[seed] for seed in seeds):.4f}",
        _percent(plain),
        _percent(recipe),
        f"{share:.2f}" if share > 0 else "none",
        ", ".join(map(str, seeds)),
    ]


def _percent(costs: list[float]) -> str:
    if math.isinf(max(costs)):
        return "diverged"
    each = " / ".join(f"{cost:+.2f}" for cost in costs)
    return f"{each}%"
