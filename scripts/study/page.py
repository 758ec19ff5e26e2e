"""Figures of studies for their pages: tables, pictures and numbers from docs/results.

A template of `pages` names one of the functions below, with its arguments after bars, for example
`{{costs | Byte GPT, SGD, equal shards | allgather int4 0.024}}`. Titles of cases may be
patterns as of file names, several with semicolons between them. A study's settings are
scripts/study/NAME.toml.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import partial

from pages import RESULTS, Values
from pages.markdown import spread, table
from study import expenses, local_steps, matrix, pictures
from study.results import Row, Study, end, shown

GAP, WORSE = 0.5, 0.2  # %


def costs(study: Study, cases: str, name: str) -> str:
    """The smallest and the largest cost of a compressor, over cases and seeds."""
    found = [cost for title in study.titles(cases) for cost in study.rows(title)[name].costs]
    return f"{min(found):.0f}% to {max(found):.0f}%"


def gaps(study: Study, cases: str, one: str, other: str) -> str:
    """Mean costs of two compressors over cases, and in how many a gap of over 0.5% is halved."""
    rows = [study.rows(title) for title in study.titles(cases)]
    pairs = [tuple(_mean_cost(each[name]) for name in (one, other)) for each in rows]
    known = [pair for pair in pairs if all(map(math.isfinite, pair))]
    means = [statistics.fmean(costs) for costs in zip(*known, strict=True)]
    large = [pair for pair in known if pair[0] > GAP]
    halved = sum(max(after, 0.0) <= before / 2 for before, after in large)
    worse = sum(after > before + WORSE for before, after in known)
    text = f"{means[0]:+.2f}% and {means[1]:+.2f}% on average over {len(known)} cases; "
    text += f"of {len(large)} in which the first costs more than {GAP}%, the second costs at most "
    text += f"half of that in {halved}; it costs over {WORSE} points more than the first in {worse}"
    return text


def _mean_cost(row: Row) -> float:
    return statistics.fmean(row.costs)


def summary(study: Study, cases: str, *names: str) -> str:
    """A row for each case: dense's score, and what each named compressor makes of it."""
    rows = []
    for title in study.titles(cases):
        dense, found = study.dense(title), study.rows(title)
        scores = [end(study.found(title).metric.name, run) for run in dense.values()]
        score = shown(study.found(title).metric.name, scores)
        rows.append([title, str(len(dense)), score, *(_beside(found.get(n)) for n in names)])
    return table(["", "seeds", "dense", *names], rows)


def across(study: Study, cases: str, *names: str) -> str:
    """A row for each named compressor, or for all, with its difference in every case."""
    titles = study.titles(cases)
    found = [study.rows(title) for title in titles]
    given = names or tuple(dict.fromkeys(name for rows in found for name in rows))
    return table(["", *titles], [[n, *(_beside(rows.get(n)) for rows in found)] for n in given])


def _beside(row: Row | None) -> str:
    return "not run" if row is None else f"{row.difference}; {row.reduction:.0f}x"


def loops(study: Study, tolerance: str, ratio: str) -> str:
    """A row for each loop, with its cost at a ratio; compressors are named "loop @ ratio"."""
    lines = []
    for row in _at(study, ratio):
        mean = statistics.mean(end(row.metric, run) or math.nan for run in row.dense.values())
        mark = "**" if row.cost > float(tolerance) else ""
        cost = f"{mark}{spread(row.costs, '+')}{mark}"
        lines.append([row.name.removesuffix(f" @ {ratio}"), f"{100 * mean:.2f}%", cost])
    return table(["", "dense", "cost, points"], lines)


def within(study: Study, tolerance: str, ratio: str) -> str:
    """Number of loops whose cost at a ratio is at most `tolerance`."""
    found = _at(study, ratio)
    return f"{sum(row.cost <= float(tolerance) for row in found)} of {len(found)}"


def _at(study: Study, ratio: str) -> list[Row]:
    rows = [row for title in study.cases for row in study.rows(title).values()]
    return [row for row in rows if row.name.endswith(f" @ {ratio}")]


def panels(study: Study, cases: str, name: str) -> str:
    """Draw a picture of cost against bytes in each case, and return a link to it."""
    rows = {title: list(study.rows(title).values()) for title in study.titles(cases)}
    pictures.panels(RESULTS / name, rows)
    return f"![Quality against bytes for every compressor](results/{name})"


def runs(study: Study) -> str:
    """Number of a study's finished runs, out of all runs."""
    wanted = {c.digest for s in study.settings for _, c in s.cells()}
    return f"{len(list(study.runs()))} of {len(wanted)} runs"


FUNCTIONS: tuple[Callable[..., str], ...] = (
    *(costs, gaps, summary, across, loops, within, panels, runs),
    *(matrix.brief, matrix.worst, matrix.parts, matrix.by_loop),
    *(matrix.signed, matrix.beyond_seeds, matrix.changed, expenses.expenses),
    *(local_steps.rounds, local_steps.payload, local_steps.mean_cost),
)


def read(page: str) -> Study:
    """The study of a page."""
    return Study(page.replace("-", "_"))


def values(study: Study) -> Values:
    """The functions of a study by name."""
    return {each.__name__: partial(each, study) for each in FUNCTIONS}
