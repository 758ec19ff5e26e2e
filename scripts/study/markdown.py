"""Markdown, and numbers as they stand in it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

import curves
import launch
from study import results, trials
from study.results import Comparison, Result
from study.trials import Task

NAMES = {"none": "dense", "topk": f"TopKEF {trials.RATIO:g}"}
OPTIMIZERS = {"sgd": "SGD", "adamw": "AdamW"}


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; the first row of `rows` comes after the header."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def spread(values: Sequence[float], sign: str = "") -> str:
    """Mean and standard error of the mean."""
    error = statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.mean(values):{sign}.2f} ± {error:.2f}"


def score(task: Task, value: float) -> str:
    """A score in its task's unit."""
    if not math.isfinite(value):
        return "diverged"
    return f"{100 * value:.2f}%" if task.column == "accuracy" else f"{value:.4f}"


def reduction(run: Result) -> str:
    """How many times fewer bytes a rank sends than with a dense ring allreduce."""
    return f"{run['dense_bytes'] / run['sent_bytes']:.1f}x"


def setting(comparison: Comparison) -> str:
    """The script, the model's size, and the command of one compressed run."""
    task, config = comparison.task, comparison.topk[0]["config"]
    trial = trials.compared(task, config["lr"], comparison.steps, "topk")[0]
    command = launch.command_line(task.example, trial.arguments, trials.RANKS)
    return (
        f"`{task.example}`: {comparison.topk[0]['parameters']:,} parameters, "
        f"{config['batch_size']} examples a rank and step. One of these runs by itself:\n\n"
        f"```\n{command}\n```"
    )


def picture(comparison: Comparison, *, log: bool) -> str:
    """Draws the training loss of all the runs; returns the link to it."""
    task = comparison.task
    path = results.FOLDER / f"{task.key}-{comparison.steps}steps.png"
    title = (
        f"{task.title}, {OPTIMIZERS[task.optimizer]}, {comparison.steps:,} steps, {trials.RANKS} "
        "ranks, every seed"
    )
    runs = {NAMES["none"]: comparison.dense, NAMES["topk"]: comparison.topk}
    curves.draw(path, title, runs, log=log)
    return f"![Training loss against steps and bytes: {title}](results/{path.name})"
