"""The report's part on classification: accuracies, and the steps to dense's final accuracy."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from study import results, trials
from study.markdown import (
    NAMES,
    OPTIMIZERS,
    differences,
    picture,
    reduction,
    score,
    scores_of,
    setting,
    table,
)
from study.results import Comparison, Result
from study.trials import Task

ELSEWHERE = """\
## Other learning rates

These runs use rates that the task's own sweep did not choose. On the digits of TensorFlow and Keras
dense does not train at 0.5, so 0.2 is near the largest stable rate: TopKEF loses more there than at
0.1. The byte CNN ran at 0.05 too, the best rate of an earlier sweep over 1,000 steps."""

TOLERANCE = 0.5  # points of accuracy that compression may cost


def section(task: Task, steps: int) -> str:
    """The page's section on the task's runs of one length."""
    title = f"## {task.title}: {OPTIMIZERS[task.optimizer]}, {steps:,} steps"
    found = results.comparison(task, steps)
    if found is None:
        return f"{title}\n\nNot run yet."
    parts = [title, setting(found), _summary(found), _verdict(found), _seeds(found), _note(found)]
    return "\n\n".join([*parts, picture(found, log=True)])


def elsewhere(tasks: Sequence[Task]) -> list[str]:
    """A section on comparisons at other learning rates, if any were made: none is left out."""
    found = [
        (task, steps, lr, at)
        for task, steps, lr in ((t, s, lr) for t in tasks for s in t.steps for lr in trials.LADDER)
        if lr != results.chosen(task) and (at := results.comparison_at(task, steps, lr))
    ]
    if not found:
        return []
    rows = [
        [
            f"{task.title}, {steps:,} steps",
            f"{lr:g}",
            *(scores_of(task, at.scores(runs)) for runs in (at.dense, at.topk)),
            differences(at),
        ]
        for task, steps, lr, at in found
    ]
    header = ["", "learning rate", *NAMES.values(), "difference"]
    return [f"{ELSEWHERE}\n\n{table(header, rows)}"]


def _summary(found: Comparison) -> str:
    header = ["", "held-out accuracy", "bytes a step and rank", "fewer bytes"]
    return table(
        header,
        [
            [
                NAMES[runs[0]["config"]["compression"]],
                scores_of(found.task, found.scores(runs)),
                f"{runs[0]['sent_bytes']:,}",
                reduction(runs[0]),
            ]
            for runs in (found.dense, found.topk)
        ],
    )


def _verdict(found: Comparison) -> str:
    points = [100 * difference for difference in found.differences]
    within = "within" if statistics.mean(points) >= -TOLERANCE else "not within"
    return (
        f"TopKEF minus dense, paired by seed: {differences(found)}, {within} the tolerance of "
        f"{TOLERANCE:g} points ({len(points)} seeds; the error is the standard error of the mean)."
    )


def _seeds(found: Comparison) -> str:
    """Every seed, good or bad."""
    names = list(NAMES.values())
    rows = []
    for dense, topk in zip(found.dense, found.topk, strict=True):
        goal = results.final_score(found.task, dense)
        accuracies = [score(found.task, each) for each in found.scores([dense, topk])]
        steps = [_steps_to(goal, run, found.task.column) for run in (dense, topk)]
        rows.append([str(dense["config"]["seed"]), *accuracies, *steps])
    return table(["seed", *names, *(f"steps, {name}" for name in names)], rows)


def _note(found: Comparison) -> str:
    every = found.dense[0]["config"]["evaluate_every"]
    return (
        f"Steps: until the held-out accuracy first reaches dense's final one with the same seed. "
        f"A run is evaluated every {every} steps; a dash means that it never got there."
    )


def _steps_to(goal: float, run: Result, column: str) -> str:
    rows = zip(run["history"]["step"], run["history"][column], strict=True)
    return next((f"{step:,}" for step, value in rows if value >= goal), "-")
