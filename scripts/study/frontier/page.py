"""docs/frontier.md, made from the results on disk and from nothing else."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import launch
from study.frontier import agenda, measured, one_ratio, pictures, recipe, records
from study.frontier.agenda import Point, Series
from study.frontier.cells import RANKS
from study.frontier.measured import Group, Measured
from study.frontier.workloads import WORKLOADS
from study.markdown import OPTIMIZERS, table

PAGE = launch.ROOT / "docs" / "frontier.md"

TITLES = {"digits": "Digits", "bytelm": "Byte language model"}
SCORES = {"accuracy": "held-out accuracy", "bits_per_byte": "held-out bits per byte"}

INTRODUCTION = """\
# Quality against bytes

<!-- Written by `make frontier` from docs/results/. Change scripts/study/frontier instead. -->

What does each payload format and exchange of TopKEF cost in quality, at how many bytes? A larger
ratio with coarser values sends as many bytes as a smaller one with finer values: this page shows
which of them to prefer. "Fewer bytes" is `stats().reduction`: the bytes a rank sends in a ring
allreduce of the dense gradients, over those it sends with TopKEF, all headers counted. With the
exchange "hierarchical" two ranks share a node, and it is the bytes that leave a node: of a ring
that runs from node to node they are as many.

{ranks} ranks, simulated in one process: one model stands for all of them, as real ranks hold the
same weights bit for bit; each has batches, gradients, residuals and a compressor of its own, and
payloads travel between them as they would through Horovod. A test trains the digits on two and on
four real ranks and finds the same weights, to the bit
(`tests/distributed/ranks/case_simulation.py`).

Every run is compared with a dense one of the same seed: same initial weights, same batches in the
same order, as many steps. The learning rate is the one that suits *dense* best, by a sweep on
validation data with other seeds ([below](#denses-learning-rates)); nothing is tuned for TopKEF. It
rises over the first 5% of the steps and falls to zero as a cosine. SGD has momentum 0.9, AdamW
PyTorch's defaults. "Corrected" is momentum correction: `TopKEF(momentum="optimizer")`, which takes
SGD's momentum or AdamW's first one over; dense keeps them. Means come with their standard errors.
`make frontier` makes it all again; a run with a line in `docs/results/frontier-*.jsonl` is not
repeated.

- Digits: `examples/pytorch_digits.py`, {digits_steps:,} steps, {digits_batch} examples a rank and
  step. Skewed shards are the rows sorted by label and cut into {ranks}: each rank has two or three
  of the ten digits.
- Byte language model: `examples/pytorch_bytelm.py`, {bytelm_steps:,} steps, {bytelm_batch}
  sequences a rank and step. With skewed shards each rank reads a quarter of the standard library,
  cut in the order of its files' names."""

EQUAL_BYTES = """\
## At equal bytes

For each exchange and format the largest ratio that still sends so many times fewer bytes, and the
final score less dense's: points of accuracy (more is better), % of bits a byte (less is better).
Out of reach: no ratio sends so few bytes, as tensors below `min_numel` travel whole."""

WITHIN = """\
## How far each format goes

The largest measured reduction that costs no more than {digits:g} points of accuracy, or
{bytelm:g}% of bits a byte, in the mean; a dash where no measured ratio does."""

SWEEPS = """\
## Dense's learning rates

Final scores on validation data, dense, equal shards, one run a seed; no table above uses these data
or these seeds. The rate in bold, the best on average, is the one used everywhere above, with skewed
shards too. A grid grows while its best rate lies on its edge."""


def write() -> Path:
    """Writes the page and its pictures; says what is missing."""
    groups = measured.groups()
    found = [group for group in groups if group.points]
    parts = [_introduction(), _machine(), _goals(found), EQUAL_BYTES]
    parts += [_equal_bytes(found, goal) for goal in sorted(agenda.GOALS, reverse=True)]
    parts += [one_ratio.section(found, _of), recipe.section()]
    parts += [WITHIN.format(**measured.TOLERANCE), _within(found)]
    parts += [*map(_section, found), SWEEPS, *map(_sweep, agenda.SERIES), _missing(groups)]
    PAGE.write_text("\n\n".join(filter(None, parts)) + "\n")
    return PAGE


def _introduction() -> str:
    return INTRODUCTION.format(
        ranks=RANKS,
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
    return f"{len(found):,} runs, one thread each, on {'; '.join(machines)}; {days}."


def _name(group: Group) -> str:
    series = group.series
    return f"{TITLES[series.workload]}, {OPTIMIZERS[series.optimizer]}, {group.shards} shards"


def difference(group: Group, cost: float, error: float | None) -> str:
    """Final score less dense's, in the workload's unit."""
    if math.isinf(cost):
        return "diverged"
    sign, unit = (-1, "") if group.series.higher_is_better else (1, "%")
    spread = "" if error is None else f" ± {error:.2f}"
    return f"{round(sign * cost, 2) + 0.0:+.2f}{spread}{unit}"


def _of(group: Group, each: Measured) -> str:
    """The same of a point; says so if it rests on one seed."""
    alone = "" if len(each.costs) > 1 else " (1 seed)"
    return difference(group, each.cost, each.error) + alone


def setting(point: Point) -> str:
    """A point in words."""
    return f"{agenda.way(point)}, {point.values}, ratio {ratio(point)}"


def ratio(point: Point) -> str:
    """What ranks send, and what owners send back where that is another one."""
    back = "" if point.gather_ratio is None else f", back {point.gather_ratio:g}"
    return f"{point.ratio:g}{back}"


def _goals(groups: Sequence[Group]) -> str:
    """What users take unasked or by name, and the best point of at least each goal's reduction."""
    rows = []
    for group in groups:
        for name, point in (("the defaults", agenda.DEFAULT), ("`compact()`", agenda.RECIPE)):
            if found := group.find(point):
                rows.append([_name(group), name, *_judged(group, found)])
        for goal in (goal for goal in agenda.GOALS if _is_asked(group, goal)):
            reached = [each for each in group.points if each.reduction >= goal]
            if reached:
                best = min(_well_known(reached), key=lambda each: each.cost)
                rows.append([_name(group), f"best at {goal:g}x or more", *_judged(group, best)])
    header = ["", "", "setting", "fewer bytes", "less dense", "within"]
    note = (
        "The best of several settings looks a little better than it is; the tables that follow "
        "have all of them, good or bad."
    )
    return f"## In short\n\n{table(header, rows)}\n\n{note}"


def _well_known(points: Sequence[Measured]) -> list[Measured]:
    """Those with the most seeds: one that had an easy seed alone is no better for it."""
    most = max(len(each.costs) for each in points)
    return [each for each in points if len(each.costs) == most]


def _judged(group: Group, each: Measured) -> list[str]:
    """Setting, reduction, difference, and whether that is within the group's tolerance."""
    met = "yes" if each.cost <= group.tolerance else "**no**"
    limit = f"{group.tolerance:g} {measured.UNIT[group.series.workload]}".replace(" %", "%")
    return [setting(each.point), f"{each.reduction:.0f}x", _of(group, each), f"{met} ({limit})"]


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
    header = ["exchange", "values", *(_name(group) for group in columns)]
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
    return "not run" if found is None else f"{_of(group, found)}, ratio {point.ratio:g}"


def _within(groups: Sequence[Group]) -> str:
    rows = []
    for kind in _kinds(groups):
        found = [_furthest(group, _alike(group, kind)) for group in groups]
        rows.append([agenda.way(kind), kind.values, *found])
    anything = [_furthest(group, group.points) for group in groups]
    rows.append(["any", "any", *anything])
    return table(["exchange", "values", *map(_name, groups)], rows)


def _alike(group: Group, kind: Point) -> list[Measured]:
    return [each for each in group.points if replace(each.point, ratio=1.0) == kind]


def _furthest(group: Group, points: Sequence[Measured]) -> str:
    found = measured.within(points, group.tolerance)
    return "-" if found is None else f"{found.reduction:.0f}x, ratio {ratio(found.point)}"


def _section(group: Group) -> str:
    series, column = group.series, WORKLOADS[group.series.workload].column
    dense = list(group.dense.values())
    scores = ", ".join(_score(column, score) for score in dense)
    mean = _score(column, statistics.mean(dense))
    opening = (
        f"Dense: {SCORES[column]} {mean} in the mean of {len(dense)} seeds ({scores}), learning "
        f"rate {agenda.chosen(series):g}. In bold, what nothing else measured here beats in both "
        "bytes and difference."
    )
    return "\n\n".join([f"## {_name(group)}", opening, pictures.link(group), _points(group)])


def _ended(column: str, scores: Sequence[float | None]) -> str:
    """The mean of all, or how many diverged."""
    finite = [score for score in scores if score is not None]
    if len(finite) == len(scores):
        return _score(column, statistics.mean(finite))
    return f"{len(scores) - len(finite)} of {len(scores)} diverged"


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
                f"{mark}{difference(group, each.cost, each.error)}{mark}",
                str(len(each.costs)),
            ]
        )
    header = ["exchange", "values", "ratio", "bytes a step and rank", f"fewer bytes, P={RANKS}"]
    header += ["P=2", "P=8", SCORES[column], "less dense", "seeds"]
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
    title = f"### {TITLES[series.workload]}, {OPTIMIZERS[series.optimizer]}, {series.steps:,} steps"
    header = ["learning rate", *(f"seed {seed}" for seed in series.sweep_seeds)]
    return f"{title}\n\n{table(header, rows)}"


def _missing(groups: Sequence[Group]) -> str:
    rows = [[_name(group), f"{group.missing:,}"] for group in groups if group.missing]
    if not rows:
        return ""
    note = "Runs that the study names and that nobody has made yet; `make frontier` goes on there."
    return f"## Missing\n\n{note}\n\n{table(['', 'runs'], rows)}"
