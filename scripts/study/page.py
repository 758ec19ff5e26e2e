"""Figures of studies for their pages: tables, pictures and numbers from docs/results.

A template of `pages` names one of the functions below, with its arguments after bars, for example
`{{difference | Byte GPT, SGD, equal shards | allgather int4 0.024}}`. Titles of cases may be
patterns as of file names. Figures of another study have its name first: `{{unseen/brief |
default}}`. A study's settings are scripts/study/NAME.toml.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from horovod_topk.cli.compare.curves import steps_to
from pages.markdown import spread, table
from study import causes, expenses, local_steps, matrix, pictures
from study.results import DENSE, RESULTS, Row, Study, end, shown

GAP, WORSE = 0.5, 0.2  # %
PLAIN = {
    "values": "float32",
    "momentum": 0,
    "follow_lr": False,
    "warmup": None,
}
HELD_OUT = {"accuracy": "held-out accuracy", "bits_per_byte": "held-out bits a byte"}


def difference(study: Study, case: str, name: str) -> str:
    """Difference between a compressor's score and dense's, as text."""
    return study.rows(case)[name].difference


def fewer(study: Study, case: str, name: str) -> str:
    """How many times fewer bytes a compressor sends than dense."""
    return f"{study.rows(case)[name].reduction:.0f}"


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


def dense(study: Study, case: str) -> str:
    """Final scores of dense training."""
    metric = study.found(case).metric.name
    return shown(metric, [end(metric, run) for run in study.dense(case).values()])


def summary(study: Study, cases: str, *names: str) -> str:
    """A row for each case: dense's score, and each named compressor's score and difference."""
    head = ["", "seeds", "dense"]
    head += [word for name in names for word in (name, "difference", "fewer bytes")]
    rows = []
    for title in study.titles(cases):
        row, found = [title, str(len(study.dense(title))), dense(study, title)], study.rows(title)
        for name in names:
            each = found.get(name)
            row += ["not run", "", ""] if each is None else _summed(each)
        rows.append(row)
    return table(head, rows)


def _summed(row: Row) -> list[str]:
    return [shown(row.metric, row.scores()), row.difference, f"{row.reduction:.1f}x"]


def across(study: Study, cases: str, *names: str) -> str:
    """A row for each named compressor, with its difference in every case."""
    titles = study.titles(cases)
    rows = []
    for name in names:
        found = [study.rows(title).get(name) for title in titles]
        cells = ["not run" if r is None else f"{r.difference}; {r.reduction:.0f}x" for r in found]
        rows.append([name, *cells])
    return table(["", *titles], rows)


def alike(study: Study, times: str, cases: str) -> str:
    """Table of settings whose reduction of bytes is `times`, or up to 6% more."""
    goal, titles = float(times), study.titles(cases)
    kinds: dict[tuple[str, str], dict[str, Row]] = {}
    for title in titles:
        for row in study.rows(title).values():
            if goal <= row.reduction <= 1.06 * goal and _has_one_ratio(row):
                best = kinds.setdefault(_kind(row), {})
                if title not in best or row.reduction < best[title].reduction:
                    best[title] = row
    rows = []
    for (way, values), found in sorted(kinds.items()):
        cells = [
            f"{found[t].difference}; ratio {found[t].asked.settings['ratio']:g}"
            if t in found
            else "not run"
            for t in titles
        ]
        rows.append([way, values, *cells])
    return table(["exchange", "values", *titles], rows)


def _has_one_ratio(row: Row) -> bool:
    return isinstance(row.asked.settings["ratio"], float)


def _kind(row: Row) -> tuple[str, str]:
    settings = row.asked.settings
    kind = ", the default" if settings["momentum"] == "auto" else ""
    way = settings.get("exchange", "allgather") + kind
    return way, settings["values"]


def everything(study: Study, case: str) -> str:
    """Table of every compressor of a case, sorted by bytes, the most bytes first.

    Bold: no other compressor sends fewer bytes and has a score at least as good.
    """
    rows = sorted(study.rows(case).values(), key=lambda row: row.reduction)
    lines = []
    for row in rows:
        beaten = any(r.reduction > row.reduction and r.cost <= row.cost for r in rows)
        mark = "" if beaten or not math.isfinite(row.cost) else "**"
        score = shown(row.metric, row.scores())
        figures = [f"{row.sent_bytes:,.0f}", f"{row.reduction:.1f}x", score]
        lines.append([row.name, *figures, f"{mark}{row.difference}{mark}", str(len(row.runs))])
    metric = HELD_OUT[study.found(case).metric.name]
    head = ["setting", "bytes a step and rank", "fewer bytes", metric, "difference", "seeds"]
    return table(head, lines)


def variants(study: Study, case: str) -> str:
    """Table of dense's scores for each value of a case's grid; the best mean is bold."""
    found = study.cases[study.titles(case)[0]]
    metric = found[0].metric
    scores = {
        each.variant[0][1]: [end(metric.name, run) for run in each.runs["dense"].values()]
        for each in found
    }
    best = max(scores, key=lambda value: metric.gain(_mean(scores[value]), 0.0))
    rows = []
    for value, ends in scores.items():
        mark = "**" if value == best else ""
        rows.append([f"{mark}{value:g}{mark}", *(shown(metric.name, [each]) for each in ends)])
    seeds = [f"seed {seed}" for seed in found[0].settings.seeds]
    missing = [[*row, *["-"] * (len(seeds) + 1 - len(row))] for row in rows]
    return table([found[0].variant[0][0], *seeds], missing)


def _mean(scores: Iterable[float | None]) -> float:
    return statistics.mean(math.nan if each is None else each for each in scores)


def seeds(study: Study, case: str) -> str:
    """Table of final scores, a row for each seed."""
    rows, metric = study.rows(case), study.found(case).metric.name
    columns = {"dense": study.dense(case), **{name: row.runs for name, row in rows.items()}}
    lines = [
        [str(seed), *(shown(metric, [end(metric, runs[seed])]) for runs in columns.values())]
        for seed in study.dense(case)
    ]
    return table(["seed", *columns], lines)


def patience(study: Study, cases: str, *names: str) -> str:
    """Table of the steps that runs need to reach the final score of dense runs, for each seed.

    Between the lengths of the cases, final scores are interpolated over the logarithm of steps.
    """
    found = {study.found(t).settings.options["steps"]: t for t in study.titles(cases)}
    metric, rows = study.found(found[min(found)]).metric.name, []
    for steps in sorted(found):
        goals = {s: end(metric, run) or 0.0 for s, run in study.dense(found[steps]).items()}
        line = [f"{steps:,}"]
        for name in names:
            ends = {n: study.rows(t)[name].runs for n, t in found.items()}
            of_seeds = [
                needed({n: end(metric, runs[s]) or math.inf for n, runs in ends.items()}, goal)
                for s, goal in goals.items()
            ]
            line.append(" and ".join(_steps(each, max(found)) for each in of_seeds))
        rows.append(line)
    return table(["steps, dense", *names], rows)


def needed(ends: dict[int, float], goal: float) -> float:
    """Steps that a run needs to end at a score of `goal` or lower.

    inf: more steps than were tried. Never less than the shortest length tried.

    ends: final scores of runs by their number of steps; lower scores are better.
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


def _steps(steps: float, most: int) -> str:
    return f"over {most:,}" if math.isinf(steps) else f"{round(steps, -1):,.0f}"


def loops(study: Study, tolerance: str, *ratios: str) -> str:
    """A row for each loop, with its cost at each ratio; compressors are named "loop @ ratio"."""
    rows: dict[str, dict[str, Row]] = {}
    for title in study.cases:
        for name, row in study.rows(title).items():
            loop, ratio = name.split(" @ ")
            rows.setdefault(loop, {})[ratio] = row
    lines = []
    for loop, found in rows.items():
        first = found[ratios[0]]
        mean = statistics.mean(end(first.metric, run) or math.nan for run in first.dense.values())
        line = [loop, f"{100 * mean:.2f}%"]
        for ratio in ratios:
            mark = "**" if found[ratio].cost > float(tolerance) else ""
            cost = spread(found[ratio].costs, "+")
            line += [f"{mark}{cost}{mark}", f"{found[ratio].reduction:.0f}x"]
        lines.append(line)
    head = [word for ratio in ratios for word in (f"cost at {ratio}", "fewer bytes")]
    return table(["", "dense", *head], lines)


def within(study: Study, tolerance: str, ratio: str) -> str:
    """Number of loops whose cost at a ratio is at most `tolerance`."""
    found = _at(study, ratio)
    return f"{sum(row.cost <= float(tolerance) for row in found)} of {len(found)}"


def beyond(study: Study, tolerance: str, ratio: str) -> str:
    """Loops whose cost at a ratio is above `tolerance`, with their cost."""
    found = [row for row in _at(study, ratio) if row.cost > float(tolerance)]
    return "; ".join(f"{row.name.split(' @ ')[0]} ({row.cost:+.2f})" for row in found)


def _at(study: Study, ratio: str) -> list[Row]:
    rows = [row for title in study.cases for row in study.rows(title).values()]
    return [row for row in rows if row.name.endswith(f" @ {ratio}")]


def same_ends(study: Study, case: str, beside: str, metric: str) -> str:
    """Number of runs of a case whose final value equals that of another case's run."""
    pairs = []
    for name, row in study.rows(case).items():
        ratio = row.asked.settings["ratio"]
        others = study.rows(beside).values()
        plain = next(r for r in others if r.asked.settings == {**PLAIN, "ratio": ratio})
        assert name
        pairs += [(end(metric, run), end(metric, plain.runs[s])) for s, run in row.runs.items()]
    return f"{sum(a == b for a, b in pairs)} of {len(pairs)}"


def total(study: Study, case: str, metric: str) -> str:
    """Number of a case's compressed runs in which a metric is above zero, and its sum over runs."""
    rows = study.rows(case).values()
    found = [end(metric, run) or 0 for row in rows for run in row.runs.values()]
    return f"{sum(each > 0 for each in found)} of {len(found)} runs, {sum(found):.0f} in all"


def scatter(study: Study, case: str, name: str) -> str:
    """Draw a picture of cost against bytes, and return a link to it."""
    title = f"{case}, {study.found(case).settings.ranks} simulated ranks"
    pictures.scatter(RESULTS / name, title, list(study.rows(case).values()))
    return f"![Quality against bytes: {title}](results/{name})"


def panels(study: Study, cases: str, name: str) -> str:
    """Draw a picture of cost against bytes in each case, and return a link to it."""
    found = {title: _run(study, title) for title in study.titles(cases)}
    pictures.panels(RESULTS / name, {title: rows for title, rows in found.items() if rows})
    return f"![Quality against bytes for every compressor](results/{name})"


def catalogue(study: Study, case: str) -> str:
    """Table of a case's compressors, with the step at which each reaches dense's final score.

    The compressor that sends the most bytes comes first.
    """
    if not _run(study, case):
        return "Not run yet."
    metric = study.found(case).metric
    lines = []
    for row in sorted(_run(study, case), key=lambda row: row.reduction):
        steps = [
            steps_to(run.curve(metric.name), end(metric.name, row.dense[seed]) or math.nan, metric)
            for seed, run in row.runs.items()
        ]
        reached = ", ".join("-" if each is None else f"{each:,.0f}" for each in steps)
        score = shown(metric.name, row.scores())
        lines.append([row.name, f"{row.reduction:.1f}x", score, row.difference, reached])
    head = ["", "fewer bytes", HELD_OUT[metric.name], "difference to dense", "steps to dense's end"]
    return table(head, lines)


def _run(study: Study, title: str) -> list[Row]:
    """A case's finished compressors; empty without a dense run, or in a sweep of dense's rates."""
    found = study.cases[title]
    is_run = found and DENSE in found[0].runs and found[0].settings.compressors
    return list(study.rows(title).values()) if is_run else []


def runs(study: Study) -> str:
    """Number of a study's finished runs, out of all runs."""
    wanted = {c.digest for s in study.settings for _, c in s.cells()}
    return f"{len(list(study.runs()))} of {len(wanted)} runs"


def calls(study: Study) -> str:
    """Table of compressor names and the calls they stand for, with the cases if calls differ."""
    found: dict[str, dict[str, list[str]]] = {}
    for settings in study.settings:
        for name, call in settings.compressors.items():
            found.setdefault(name, {}).setdefault(call, []).append(settings.title)
    rows = []
    for name, meant in found.items():
        only = len(meant) == 1
        said = [f"`{call}`" + ("" if only else f" ({', '.join(at)})") for call, at in meant.items()]
        rows.append([name, "; ".join(said)])
    return table(["name", "compressor"], rows)


def curves(study: Study, case: str, name: str) -> str:
    """Draw a picture of all runs' curves, and return a link to it."""
    pictures.curves(RESULTS / name, study.found(case))
    return f"![Every run against steps and bytes: {case}](results/{name})"


def bars(study: Study, tolerance: str, name: str, *ratios: str) -> str:
    """Draw a picture of each loop's cost, and return a link to it."""
    pictures.bars(RESULTS / name, float(tolerance), {each: _at(study, each) for each in ratios})
    return f"![Points of accuracy that each loop costs](results/{name})"


def machine(study: Study) -> str:
    """Number of runs, with their machines, library versions and dates."""
    found = list(study.runs())
    places = {f"{r.machine['cpu']}, {r.machine['cores']} cores" for r in found}
    versions = {
        f"{library} {r.machine[key]}"
        for r in found
        for key, library in LIBRARIES.items()
        if key in r.machine
    }
    days = sorted({str(run.machine["date"]) for run in found})
    span = " to ".join(dict.fromkeys([days[0], days[-1]]))
    return (
        f"{len(found)} runs on {'; '.join(sorted(places))}; {', '.join(sorted(versions))}; {span}"
    )


LIBRARIES = {
    "python": "Python",
    "torch": "PyTorch",
    "tensorflow": "TensorFlow",
    "tensorflow-cpu": "TensorFlow",
    "keras": "Keras",
    "tf_keras": "tf-keras",
    "horovod": "Horovod",
}
FUNCTIONS: dict[str, Callable[..., str]] = {
    each.__name__: each
    for each in (
        *(
            difference,
            fewer,
            costs,
            gaps,
            dense,
            summary,
            across,
            alike,
            everything,
            variants,
            seeds,
        ),
        *(patience, loops, within, beyond, same_ends, total, scatter, curves, bars, machine),
        *(matrix.progress, matrix.brief, matrix.worst, matrix.means, matrix.cells, matrix.dots),
        *(matrix.parts, matrix.by_loop, matrix.signed, matrix.beyond_seeds, matrix.changed),
        *(panels, catalogue, calls, runs),
        *(expenses.expenses, causes.causes, causes.by_seed),
        *(local_steps.rounds, local_steps.exchanged, local_steps.payload, local_steps.mean_cost),
        local_steps.seconds,
    )
}


def read(page: str) -> Study:
    """The study of a page."""
    return Study(page.replace("-", "_"))


class Figures(Mapping[str, Callable[..., str]]):
    """The functions of a study by name, and those of other studies behind their names."""

    def __init__(self, study: Study) -> None:
        self._study = study

    def __getitem__(self, name: str) -> Callable[..., str]:
        other, _, function = name.rpartition("/")
        return partial(FUNCTIONS[function], Study(other) if other else self._study)

    def __iter__(self) -> Iterator[str]:
        return iter(FUNCTIONS)

    def __len__(self) -> int:
        return len(FUNCTIONS)


values = Figures
