"""Markdown, and numbers as they stand in it."""

from __future__ import annotations

import math
import re
import statistics
import textwrap
from collections.abc import Iterable, Sequence

import curves
import launch
from study import results, trials
from study.results import Comparison, Result
from study.trials import Task

NAMES = {"none": "dense", "topk": f"TopKEF {trials.RATIO:g}"}
LEAST_FOR_ERROR = 3  # seeds; of fewer, every value is shown and no error
OPTIMIZERS = {"sgd": "SGD", "adamw": "AdamW"}


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; the first row of `rows` comes after the header."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def filled(prose: str) -> str:
    """Paragraphs and bullets with their lines broken anew, after figures have been put in."""
    return "\n\n".join(
        "\n".join(map(_fill, re.split(r"\n(?=- )", block))) for block in prose.split("\n\n")
    )


def _fill(block: str) -> str:
    indent = "  " * block.startswith("- ")
    words = " ".join(block.split())
    return textwrap.fill(words, 100, subsequent_indent=indent, break_on_hyphens=False)


def spread(values: Sequence[float], sign: str = "", unit: str = "") -> str:
    """Values, one a seed: each of one or two; of three or more, mean and its standard error.

    A standard error of two values says nothing: the values themselves stand there.
    """
    if len(values) < LEAST_FOR_ERROR:
        return ", ".join(f"{rounded(value):{sign}.2f}{unit}" for value in values)
    return f"{rounded(statistics.mean(values)):{sign}.2f} ± {standard_error(values):.2f}{unit}"


def standard_error(values: Sequence[float]) -> float:
    """The standard error of the mean of three values or more."""
    return statistics.stdev(values) / math.sqrt(len(values))


def rounded(value: float) -> float:
    """To two decimals, without a negative zero."""
    return round(value, 2) + 0.0


def score(task: Task, value: float) -> str:
    """A score in its task's unit."""
    if not math.isfinite(value):
        return "diverged"
    return f"{100 * value:.2f}%" if task.column == "accuracy" else f"{value:.4f}"


def scores_of(task: Task, scores: Sequence[float]) -> str:
    """Final scores of all seeds in the task's unit, as `spread` shows them."""
    if task.column == "accuracy":
        return spread([100 * each for each in scores], unit="%")
    return ", ".join(score(task, each) for each in scores)


def differences(comparison: Comparison) -> str:
    """TopKEF's scores less dense's: points of accuracy, or % of dense's bits a byte."""
    if comparison.task.column == "accuracy":
        return spread([100 * each for each in comparison.differences], sign="+") + " points"
    return ", ".join(f"{gap:+.1%}" for gap in comparison.gaps)


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
        f"{config['batch_size']} examples a rank and step. To repeat one of these runs:\n\n"
        f"```\n{command}\n```"
    )


def picture(comparison: Comparison, *, log: bool) -> str:
    """Draws the training loss of all the runs; returns the link to it."""
    task = comparison.task
    path = results.FOLDER / f"{task.key}-{comparison.steps}steps.png"
    title = (
        f"{task.title}, {OPTIMIZERS[task.optimizer]}, {comparison.steps:,} steps, {trials.RANKS} "
        "real ranks, every seed"
    )
    runs = {NAMES["none"]: comparison.dense, NAMES["topk"]: comparison.topk}
    curves.draw(path, title, runs, log=log)
    return f"![Training loss against steps and bytes: {title}](results/{path.name})"
