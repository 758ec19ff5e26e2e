"""Figures of studies for their pages: tables, pictures and numbers from docs/results.

A template of `pages` names one of the functions below, with its arguments after bars, for example
`{{costs | Byte GPT, SGD, equal shards | allgather int4 0.024}}`. Titles of cases may be
patterns as of file names, several with semicolons between them. A study's settings are
scripts/study/NAME.toml.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.network import QUANTISED, SPARSE
from horovod_topk.cli.bench.figures import figures
from horovod_topk.core.run.substitute import Substitute, parse
from horovod_topk.errors import TopKError
from horovod_topk.local.call import LocalCall
from pages import RESULTS, Values, stored
from pages.markdown import spread, table
from study import matrix, pictures
from study.results import Row, Study, end, shown

GAP, WORSE = 0.5, 0.2  # %
EXCHANGED = {"sparse": SPARSE, "quantised": QUANTISED}  # runs of `benchmarks.network`, at each rate
LINKS = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s"}


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


# Time of methods


def expenses(study: Study) -> str:
    """A row for each method: encoding time, and exchange time of a ResNet-50's gradients."""
    encode, network = stored("encode")["encode"], stored("network")
    multiples = {_key(call): multiple for call, (_, multiple) in encode.items() if "(" in call}
    rows = []
    for kind, names in EXCHANGED.items():
        links = [figures(network[f"{kind}-{rate}"]) for rate in LINKS]
        for name in names:
            found, multiple = [link[name] for link in links], multiples.get(_key(name))
            encode_cost = "" if multiple is None else f"{multiple:.1f}"
            seconds = (f"{each.exchange:.2f}" for each in found)
            rows.append([f"`{name}`", encode_cost, *seconds, f"{(found[-1].bytes or 0) / 1e6:.1f}"])
    head = ["", "encode, of `r += g`", *(f"exchange, {words}, s" for words in LINKS.values())]
    return table([*head, "MB a step"], rows)


def _key(call: str) -> str:
    """A call without its exchange, on which encoding does not depend."""
    try:
        asked = parse(call)
    except TopKError:
        return call
    kept = {key: value for key, value in asked.settings.items() if key != "exchange"}
    return str(Substitute(asked.name, kept))


# Local steps: what an exchange sends, and what a method costs beside dense


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


FUNCTIONS: tuple[Callable[..., str], ...] = (
    *(costs, gaps, summary, across, loops, within, panels, runs),
    *(matrix.brief, matrix.worst, matrix.parts, matrix.by_loop),
    *(matrix.signed, matrix.beyond_seeds, matrix.changed, expenses),
    *(rounds, payload, mean_cost),
)


def read(page: str) -> Study:
    """The study of a page."""
    return Study(page.replace("-", "_"))


def values(study: Study) -> Values:
    """The functions of a study by name."""
    return {each.__name__: partial(each, study) for each in FUNCTIONS}
