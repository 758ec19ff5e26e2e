"""The report's part on classification: accuracies, and the steps to dense's final accuracy."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from study import results, trials
from study.markdown import NAMES, OPTIMIZERS, picture, reduction, score, setting, spread, table
from study.results import Comparison, Result
from study.trials import Task

ELSEWHERE = """\
## Other learning rates

Comparisons at rates that the task's own sweep did not choose: for TensorFlow's digits 0.2, as good
as 0.1 in the sweep, for those of Keras what was chosen for the others, for snippets the rate of a
sweep at 1,000 steps. Near the largest rate that dense stands, TopKEF loses more."""

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
            *(spread([100 * x for x in at.scores(runs)]) + "%" for runs in (at.dense, at.topk)),
            spread([100 * x for x in at.differences], sign="+") + " points",
        ]
        for task, steps, lr, at in found
    ]
    header = ["", "learning rate", *NAMES.values(), "difference"]
    return [f"{ELSEWHERE}\n\n{table(header, rows)}"]


def _summary(found: Comparison) -> str:
    header = ["", "held-out accuracy", "bytes a step and rank", "fewer bytes", "ms a step"]
    return table(
        header,
        [
            [
                NAMES[runs[0]["config"]["compression"]],
                spread([100 * each for each in found.scores(runs)]) + "%",
                f"{runs[0]['sent_bytes']:,}",
                reduction(runs[0]),
                f"{1e3 * statistics.median(run['seconds_per_step'] for run in runs):.1f}",
            ]
            for runs in (found.dense, found.topk)
        ],
    )


def _verdict(found: Comparison) -> str:
    points = [100 * difference for difference in found.differences]
    within = "within" if statistics.mean(points) >= -TOLERANCE else "not within"
    return (
        f"TopKEF less dense, seed by seed: {spread(points, sign='+')} points, {within} "
        f"{TOLERANCE:g} points. Means over {len(points)} seeds come with their standard errors."
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
        f"Steps: until the first evaluation, one every {every} steps, that reaches the final "
        "accuracy of dense with the same seed; a dash where none did."
    )


def _steps_to(goal: float, run: Result, column: str) -> str:
    rows = zip(run["history"]["step"], run["history"][column], strict=True)
    return next((f"{step:,}" for step, value in rows if value >= goal), "-")
