"""The report's part on the language model: bits per byte at every length."""

from __future__ import annotations

from collections.abc import Sequence

from study import results
from study.markdown import (
    NAMES,
    OPTIMIZERS,
    differences,
    picture,
    reduction,
    score,
    setting,
    table,
)
from study.results import Comparison
from study.trials import Task

TITLE = "## Byte GPT: held-out bits per byte"
MODEL = """\
A small GPT predicts the next byte of source files from Python's standard library. Fewer bits are
better. "More bits" is TopKEF's score relative to dense's, for seed 0 and seed 1."""


def section(tasks: Sequence[Task]) -> str:
    """One section for all optimizers."""
    wanted = [(task, steps) for task in tasks for steps in task.steps]
    found = [results.comparison(task, steps) for task, steps in wanted]
    finished = [each for each in found if each is not None]
    missing = [run for run, each in zip(wanted, found, strict=True) if each is None]
    if not finished:
        return f"{TITLE}\n\nNot run yet."
    longest = [each for each in finished if each.steps == max(each.task.steps)]
    parts = [TITLE, MODEL, setting(finished[0]), _scores(finished), *_not_run(missing)]
    return "\n\n".join([*parts, *(picture(each, log=False) for each in longest)])


def _not_run(missing: Sequence[tuple[Task, int]]) -> list[str]:
    """Says which comparisons have runs outstanding, if any have."""
    names = [f"{OPTIMIZERS[task.optimizer]} at {steps:,} steps" for task, steps in missing]
    return [f"Not run to the end yet: {', '.join(names)}."] if names else []


def _scores(finished: Sequence[Comparison]) -> str:
    seeds = finished[0].task.seeds
    columns = [f"{name}, seed {seed}" for name in NAMES.values() for seed in seeds]
    return table(
        ["optimizer", "steps", *columns, "more bits", "fewer bytes"],
        [
            [
                OPTIMIZERS[each.task.optimizer],
                f"{each.steps:,}",
                *(score(each.task, value) for value in each.scores(each.dense + each.topk)),
                differences(each),
                reduction(each.topk[0]),
            ]
            for each in finished
        ],
    )
