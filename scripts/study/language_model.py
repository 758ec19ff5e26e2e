"""The report's part on the language model: bits per byte, and how the gap moves with steps."""

from __future__ import annotations

from collections.abc import Sequence

from study import results, trials
from study.markdown import NAMES, OPTIMIZERS, picture, reduction, score, setting, table
from study.results import Comparison
from study.trials import Task

TITLE = "## Byte language model: held-out bits per byte"
GAP = """\
Gap: TopKEF's mean over dense's, less one. Plain error feedback sends every coordinate in the end,
but late: at ratio {ratio:g} a coordinate is sent once in {wait:,.0f} steps on average and waits in
the residual until then. A run that is short against that wait pays for it; a longer one, less."""


def section(tasks: Sequence[Task]) -> str:
    """One section for all optimizers."""
    wanted = [(task, steps) for task in tasks for steps in task.steps]
    found = [results.comparison(task, steps) for task, steps in wanted]
    finished = [each for each in found if each is not None]
    missing = [run for run, each in zip(wanted, found, strict=True) if each is None]
    if not finished:
        return f"{TITLE}\n\nNot run yet."
    longest = [each for each in finished if each.steps == max(each.task.steps)]
    parts = [TITLE, setting(finished[0]), _scores(finished), *_not_run(missing)]
    parts += [GAP.format(ratio=trials.RATIO, wait=1 / trials.RATIO), *map(_trend, longest)]
    return "\n\n".join([*parts, *(picture(each, log=False) for each in longest)])


def _not_run(missing: Sequence[tuple[Task, int]]) -> list[str]:
    """Says which comparisons have runs outstanding, if any have."""
    names = [f"{OPTIMIZERS[task.optimizer]} at {steps:,} steps" for task, steps in missing]
    return [f"Not run to the end yet: {', '.join(names)}."] if names else []


def _scores(finished: Sequence[Comparison]) -> str:
    seeds = finished[0].task.seeds
    columns = [f"{name}, seed {seed}" for name in NAMES.values() for seed in seeds]
    return table(
        ["optimizer", "steps", *columns, "gap", "fewer bytes"],
        [
            [
                OPTIMIZERS[each.task.optimizer],
                f"{each.steps:,}",
                *(score(each.task, value) for value in each.scores(each.dense + each.topk)),
                f"{each.gap:+.1%}",
                reduction(each.topk[0]),
            ]
            for each in finished
        ],
    )


def _trend(longest: Comparison) -> str:
    task = longest.task
    shortest = results.comparison(task, min(task.steps))
    if shortest is None:
        return ""
    return (
        f"{OPTIMIZERS[task.optimizer]}: {shortest.gap:+.1%} at {shortest.steps:,} steps, "
        f"{longest.gap:+.1%} at {longest.steps:,}."
    )
