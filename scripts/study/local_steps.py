"""Figures of local steps: what an exchange sends, and what a method costs beside dense."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from horovod_topk.local.call import LocalCall
from pages.markdown import table
from study.results import Row, Study


def rounds(study: Study, cases: str, *names: str) -> str:
    """A row for each method: how many times fewer bytes it sends, and its difference in cases.

    An exchange is compared with one of float32, and the bytes of all steps with those of an
    exchange in every step. Models differ: the smallest and the largest figure stand there.
    """
    titles = study.titles(cases)
    rows = []
    for name in names:
        found = [study.rows(title).get(name) for title in titles]
        known = [row for row in found if row is not None]
        exchanges = [row.reduction / every_of(row) for row in known]
        cells = ["not run" if row is None else row.difference for row in found]
        rows.append([name, times(exchanges), times([row.reduction for row in known]), *cells])
    return table(["", "an exchange", "all steps", *titles], rows)


def payload(study: Study, case: str, name: str) -> str:
    """How many times smaller a rank's payload is than the model in float32, of an allgather."""
    row = study.rows(case)[name]
    ranks = study.found(case).settings.ranks
    return f"{row.reduction / every_of(row) * ranks / 2:.0f}"


def mean_cost(study: Study, cases: str, name: str) -> str:
    """The mean over cases of a method's cost beside dense, in %."""
    costs = [study.rows(title)[name].cost for title in study.titles(cases)]
    return f"{statistics.fmean(costs):+.1f}%"


def every_of(row: Row) -> int:
    """Inner steps of a round; 1: ranks exchange in every step."""
    return row.asked.config.steps if isinstance(row.asked, LocalCall) else 1


def times(reductions: Sequence[float]) -> str:
    """So many times fewer bytes, from the smallest to the largest figure."""
    known = [each for each in reductions if not math.isnan(each)]
    if not known:
        return "no bytes"
    ends = (f"{each:,.{0 if each >= 10 else 1}f}x" for each in (min(known), max(known)))
    return " to ".join(dict.fromkeys(ends))
