"""docs/frontier.md, made from the results on disk and from nothing else."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import launch
from study.frontier import agenda, measured, one_ratio, pictures, recipe, records, takeaways
from study.frontier.agenda import Point, Series
from study.frontier.cells import RANKS
from study.frontier.measured import Group, Measured
from study.frontier.workloads import WORKLOADS
from study.markdown import LEAST_FOR_ERROR, OPTIMIZERS, spread, table

PAGE = launch.ROOT / "docs" / "frontier.md"

SCORES = {"accuracy": "held-out accuracy", "bits_per_byte": "held-out bits per byte"}

INTRODUCTION = """\
# Quality against bytes

<!-- Written by `make frontier` from docs/results/. Change scripts/study/frontier instead. -->

What does each setting of TopKEF cost in quality, and how many bytes does it save? **Every figure on
this page comes from {ranks} simulated ranks**: one process on a CPU trains for all of them, with
the real compressor and real gradients. [accuracy.md](accuracy.md) has runs on real ranks."""

READING = """\
## How to read the tables

- *Exchange*: `allgather`, `sharded` or `hierarchical` (two ranks a node), as
  `TopKEF(exchange=...)`.
- *Corrected*: with momentum correction, `TopKEF(momentum="optimizer")`. TopKEF then takes over
  SGD's momentum, or AdamW's first one. Dense keeps the optimizer's own.
- *Values*: the number format that is sent. *Ratio*: the share of the elements that is sent.
- *Fewer bytes*: what a rank sends in a ring allreduce of the dense gradients, divided by what it
  sends with TopKEF, headers included (`stats().reduction`). For `hierarchical`: what leaves a node.
- *Difference*: the final score minus dense's with the same seed. Accuracy is in points (more is
  better), bits a byte in % of dense's (fewer is better). Three seeds or more are a mean with its
  standard error, two seeds are two values. Pictures have bars for them.
- *Skewed shards*: ranks see different data. A rank has two or three of the ten digits, or a quarter
  of the standard library, cut in the order of its files' names.
- *Bold*: no other setting measured here sends fewer bytes and is better, on average over its seeds.
- *Out of reach*: no ratio sends so few bytes, because tensors below `min_numel` are sent whole."""

METHOD = """\
## How it was measured

- Ranks hold the same weights bit for bit, so one model stands for all of them. Each simulated rank
  has its own batches, gradients, residuals and compressor, and payloads travel between ranks as
  they would through Horovod. A test trains the digits on two and on four real ranks and finds the
  same weights, to the bit (`tests/distributed/ranks/case_simulation.py`).
- A run shares initial weights, batches and the number of steps with dense's run of the same seed.
- The learning rate is dense's best one, from a [sweep](#denses-learning-rates) on validation data
  with other seeds. Nothing is tuned for TopKEF. The rate rises over the first 5% of the steps and
  falls to zero as a cosine. SGD has momentum 0.9, AdamW has PyTorch's defaults.
- Digits CNN: `examples/pytorch_digits.py`, {digits_steps:,} steps, {digits_batch} examples a rank
  and step. Byte GPT: `examples/pytorch_bytelm.py`, {bytelm_steps:,} steps, {bytelm_batch} sequences
  a rank and step.
- `make frontier` makes the missing runs and writes this page. A run with a line in
  `docs/results/frontier-*.jsonl` is not repeated."""

EQUAL_BYTES = """\
## At equal bytes

For each exchange and format, the largest ratio that still sends so many times fewer bytes ({ranks}
simulated ranks), and its difference to dense."""

WITHIN = """\
## How far each format goes

The largest measured reduction that costs at most {digits:g} points of accuracy, or {bytelm:g}% of
bits a byte, on average over the seeds ({ranks} simulated ranks). A dash: no measured ratio does."""

SWEEPS = """\
## Dense's learning rates

Final scores of dense on validation data, equal shards, one run a seed. The tables above use other
data and other seeds. The best rate on average is in bold; all runs of that task and optimizer use
it, with skewed shards too. If the best rate lies at the edge of the grid, the grid grows."""


def write() -> Path:
    """Writes the page and its pictures; says what is missing."""
    groups = measured.groups()
    found = sorted((group for group in groups if group.points), key=_place)
    parts = [INTRODUCTION.format(ranks=RANKS), takeaways.section(found, cell), READING]
    parts += [_goals(found), EQUAL_BYTES.format(ranks=RANKS)]
    parts += [_equal_bytes(found, goal) for goal in sorted(agenda.GOALS)]
    parts += [one_ratio.section(found, cell), recipe.section()]
    parts += [WITHIN.format(ranks=RANKS, **measured.TOLERANCE), _within(found)]
    parts += [*map(_section, found), _method(), _machine()]
    parts += [SWEEPS, *map(_sweep, agenda.SERIES), _missing(groups)]
    PAGE.write_text("\n\n".join(filter(None, parts)) + "\n")
    return PAGE


def _place(group: Group) -> tuple[bool, bool, bool]:
    """Equal shards first, then SGD, then the digits."""
    series = group.series
    return group.shards != "equal", series.optimizer != "sgd", series.workload != "digits"


def _method() -> str:
    return METHOD.format(
        digits_steps=agenda.DIGITS.steps,
        bytelm_steps=agenda.BYTELM.steps,
        digits_batch=WORKLOADS["digits"].batch_size,
        bytelm_batch=WORKLOADS["bytelm"].batch_size,
    )


def _machine() -> str:
    found = [run["environment"] for run in records.finished().values()]
    form = "{cpu}, {cores} cores shared with other work, Python {python}, PyTorch {torch}"
    machines = sorted({form.format(**each) for each in found})
    dates = sorted({each["date"] for each in found})
    days = " to ".join(dict.fromkeys([*dates[:1], *dates[-1:]]))
    return f"{len(found):,} runs, one CPU thread each, on {'; '.join(machines)}; {days}."


def difference(group: Group, each: Measured) -> str:
    """Final scores minus dense's, in the workload's unit, as `spread` shows them."""
    if diverged := sum(map(math.isinf, each.costs)):
        return "diverged" if diverged == len(each.costs) else _diverged(diverged, len(each.costs))
    sign, unit = (-1, "") if group.series.higher_is_better else (1, "%")
    return spread([sign * cost for cost in each.costs], "+", unit)


def _diverged(runs: int, of: int) -> str:
    return f"{runs} of {of} diverged"


def cell(group: Group, each: Measured) -> str:
    """The same of a point; says so if it rests on one seed."""
    alone = "" if len(each.costs) > 1 else " (1 seed)"
    return difference(group, each) + alone


def setting(point: Point) -> str:
    """A point in words."""
    return f"{agenda.way(point)}, {point.values}, ratio {ratio(point)}"


def ratio(point: Point) -> str:
    """What ranks send, and what owners send back where that is another one."""
    back = "" if point.gather_ratio is None else f", gather_ratio {point.gather_ratio:g}"
    return f"{point.ratio:g}{back}"


def _goals(groups: Sequence[Group]) -> str:
    """The default, `compact()`, and the best point of at least each goal's reduction."""
    rows = []
    for group in groups:
        for called, point in (("the default", agenda.DEFAULT), ("`compact()`", agenda.RECIPE)):
            if found := group.find(point):
                rows.append([group.name, called, *_judged(group, found)])
        for goal in (goal for goal in agenda.GOALS if _is_asked(group, goal)):
            reached = [each for each in group.points if each.reduction >= goal]
            if reached:
                best = min(_well_known(reached), key=lambda each: each.cost)
                rows.append([group.name, f"best at {goal:g}x or more", *_judged(group, best)])
    header = ["task", "", "setting", "fewer bytes", "difference", "within the tolerance"]
    note = (
        f"{RANKS} simulated ranks. The best of many settings is partly luck: on new seeds it would "
        "look a little worse. The tables below have all settings, good or bad."
    )
    return f"## In short\n\n{note}\n\n{table(header, rows)}"


def _well_known(points: Sequence[Measured]) -> list[Measured]:
    """The points with the most seeds: one seed alone may have been an easy one."""
    most = max(len(each.costs) for each in points)
    return [each for each in points if len(each.costs) == most]


def _judged(group: Group, each: Measured) -> list[str]:
    """Setting, reduction, difference, and whether that is within the group's tolerance."""
    met = "yes" if each.cost <= group.tolerance else "**no**"
    limit = f"{group.tolerance:g} {measured.UNIT[group.series.workload]}".replace(" %", "%")
    return [setting(each.point), f"{each.reduction:.0f}x", cell(group, each), f"{met} ({limit})"]


def _is_asked(group: Group, goal: float) -> bool:
    """Whether the study looks at this reduction here."""
    return group.series.workload == "bytelm" or goal == max(agenda.GOALS)


def _equal_bytes(groups: Sequence[Group], goal: float) -> str:
    """Every format and exchange at one reduction; a column a group."""
    columns = [group for group in groups if _is_asked(group, goal)]
    rows = []
    for kind in _kinds(columns):
        cells = [_cell(group, kind, goal) for group in columns]
        rows.append([agenda.way(kind), kind.values, *cells])
    header = ["exchange", "values", *(group.name for group in columns)]
    return f"### {goal:g} times fewer bytes\n\n{table(header, rows)}" if columns else ""


def _kinds(groups: Sequence[Group]) -> list[Point]:
    """What the points measured differ in besides their ratio, in the agenda's order."""
    known = {replace(each.point, ratio=1.0) for group in groups for each in group.points}
    momenta, ways = (
        (0.0, agenda.MOMENTUM),
        product((*agenda.EXCHANGES, agenda.NODES), agenda.FORMATS),
    )
    kinds = [Point(*way, 1.0, momentum) for way, momentum in product(ways, momenta)]
    return sorted(filter(known.__contains__, kinds), key=lambda kind: kind.momentum)


def _cell(group: Group, kind: Point, goal: float) -> str:
    point = agenda.largest_ratio(group.series.workload, kind.exchange, kind.values, goal)
    if point is None:
        return "out of reach"
    point = replace(point, momentum=kind.momentum)
    found = group.find(point)
    return "not run" if found is None else f"{cell(group, found)}; ratio {point.ratio:g}"


def _within(groups: Sequence[Group]) -> str:
    rows = []
    for kind in _kinds(groups):
        found = [_furthest(group, _alike(group, kind)) for group in groups]
        rows.append([agenda.way(kind), kind.values, *found])
    anything = [_furthest(group, group.points) for group in groups]
    rows.append(["any", "any", *anything])
    return table(["exchange", "values", *(group.name for group in groups)], rows)


def _alike(group: Group, kind: Point) -> list[Measured]:
    return [each for each in group.points if replace(each.point, ratio=1.0) == kind]


def _furthest(group: Group, points: Sequence[Measured]) -> str:
    found = measured.within(points, group.tolerance)
    return "-" if found is None else f"{found.reduction:.0f}x, ratio {ratio(found.point)}"


def _section(group: Group) -> str:
    series, column = group.series, WORKLOADS[group.series.workload].column
    dense = list(group.dense.values())
    scores = ", ".join(_score(column, score) for score in dense)
    mean = f", mean {_score(column, statistics.mean(dense))}" * (len(dense) >= LEAST_FOR_ERROR)
    opening = (
        f"{RANKS} simulated ranks, learning rate {agenda.chosen(series):g}. Dense's "
        f"{SCORES[column]}, seed by seed: {scores}{mean}."
    )
    return "\n\n".join([f"## {group.name}", opening, pictures.link(group), _points(group)])


def _ended(column: str, scores: Sequence[float | None]) -> str:
    """The mean of all, both of two, or how many diverged."""
    finite = [score for score in scores if score is not None]
    if len(finite) < len(scores):
        return _diverged(len(scores) - len(finite), len(scores))
    shown = finite if len(finite) < LEAST_FOR_ERROR else [statistics.mean(finite)]
    return ", ".join(_score(column, score) for score in shown)


def _points(group: Group) -> str:
    best = {each.point for each in measured.frontier(group.points)}
    column = WORKLOADS[group.series.workload].column
    rows = []
    for each in group.points:
        mark = "**" if each.point in best else ""
        others = (_elsewhere(group, each.point, ranks) for ranks in (2, 8))
        rows.append(
            [
                f"{mark}{agenda.way(each.point)}{mark}",
                each.point.values,
                ratio(each.point),
                f"{each.sent_bytes:,}",
                f"{each.reduction:.1f}x",
                *others,
                _ended(column, list(each.scores.values())),
                f"{mark}{difference(group, each)}{mark}",
                str(len(each.costs)),
            ]
        )
    header = ["exchange", "values", "ratio", "bytes a step and rank", f"fewer bytes, P={RANKS}"]
    header += ["P=2", "P=8", SCORES[column], "difference", "seeds"]
    return table(header, rows)


def _elsewhere(group: Group, point: Point, ranks: int) -> str:
    """The reduction with another number of ranks."""
    if point.exchange == agenda.NODES and ranks == 2:
        return "one node"
    return f"{agenda.reduction(group.series.workload, point, ranks):.1f}x"


def _score(column: str, value: float) -> str:
    return f"{100 * value:.2f}%" if column == "accuracy" else f"{value:.4f}"


def _sweep(series: Series) -> str:
    column = WORKLOADS[series.workload].column
    scores, chosen = agenda.sweep_scores(series), agenda.chosen(series)
    rows = [
        [f"**{lr:g}**" if lr == chosen else f"{lr:g}", *(_score(column, each) for each in values)]
        for lr, values in scores.items()
        if values
    ]
    if not rows:
        return ""
    task, optimizer = measured.TITLES[series.workload], OPTIMIZERS[series.optimizer]
    title = f"### {task}, {optimizer}, {series.steps:,} steps"
    header = ["learning rate", *(f"seed {seed}" for seed in series.sweep_seeds)]
    return f"{title}\n\n{table(header, rows)}"


def _missing(groups: Sequence[Group]) -> str:
    rows = [[group.name, f"{group.missing:,}"] for group in groups if group.missing]
    if not rows:
        return ""
    note = "Runs of the study that have not been made yet; `make frontier` makes them."
    return f"## Missing\n\n{note}\n\n{table(['', 'runs'], rows)}"
