"""Results on disk, one JSON file a trial, and the learning rates they speak for."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

import launch
from study import trials
from study.trials import Task, Trial

FOLDER = launch.ROOT / "docs" / "results"
PARTIAL = launch.ROOT / "build" / "trial.json"  # of the run under way

Result = dict[str, Any]  # what an example writes with --json


class Scored(Protocol):
    """Something whose runs have scores."""

    @property
    def higher_is_better(self) -> bool:
        """Whether a larger score is the better one."""
        ...


def path_of(trial: Trial) -> Path:
    """Where the trial's result is, or will be."""
    return FOLDER / f"{trial.name}.json"


def load(wanted: Iterable[Trial]) -> list[Result]:
    """The results of those trials that are finished."""
    return [json.loads(path_of(t).read_text()) for t in wanted if path_of(t).exists()]


def finish(wanted: Iterable[Trial], description: str) -> None:
    """Runs those trials that have no result yet.

    Raises:
        RunFailedError: one failed; the results so far stay.
    """
    missing = [trial for trial in wanted if not path_of(trial).exists()]
    if not missing:
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    for trial in (bar := tqdm(missing, desc=description, unit="run")):
        bar.set_postfix_str(trial.name)
        launch.run(
            trial.task.example,
            [*trial.arguments, "--json", str(PARTIAL)],
            ranks=trials.RANKS,
            limit_seconds=120 + 0.5 * trial.steps,
        )
        PARTIAL.replace(path_of(trial))


def final_score(task: Task, result: Result) -> float:
    """The score at the end of a run; the worst possible one if the run diverged."""
    score = float(result["history"][task.column][-1])
    worst = -math.inf if task.higher_is_better else math.inf
    return score if math.isfinite(score) else worst


def sweep_scores(task: Task) -> dict[float, list[float]]:
    """Final validation scores, one a seed, for each learning rate of the sweep so far.

    While the best rate lies at the edge of the grid, the grid grows by the next rate of `LADDER`.
    A rate that has not been run has no scores.
    """
    return grown(task.grid, partial(_scores, task), partial(best, task))


def grown(
    grid: Iterable[float],
    scores_of: Callable[[float], list[float]],
    best_of: Callable[[dict[float, list[float]]], float],
) -> dict[float, list[float]]:
    """Scores of the learning rates of a grid, and of the rates that it has to grow by.

    Args:
        grid: learning rates to begin with, of `trials.LADDER`.
        scores_of: one score a seed for a learning rate; none if it has not been run.
        best_of: the learning rate to prefer.
    """
    scores = {lr: scores_of(lr) for lr in grid}
    while all(scores.values()):
        lr = best_of(scores)
        place = trials.LADDER.index(lr)
        beyond = {min(scores): place - 1, max(scores): place + 1}.get(lr)
        if beyond is None:
            break
        scores[trials.LADDER[beyond]] = scores_of(trials.LADDER[beyond])
    return dict(sorted(scores.items()))


def _scores(task: Task, lr: float) -> list[float]:
    runs = trials.sweep(task, lr)
    finished = load(runs)
    return [final_score(task, each) for each in finished] if len(finished) == len(runs) else []


def best(task: Scored, scores: dict[float, list[float]]) -> float:
    """The learning rate with the best mean score; the smaller one of equals."""
    sign = -1 if task.higher_is_better else 1
    return min(sorted(scores), key=lambda lr: sign * statistics.mean(scores[lr]))


def sweep(task: Task) -> float:
    """Finishes the sweep, however far its grid has to grow; returns the learning rate chosen."""
    while missing := [lr for lr, scores in sweep_scores(task).items() if not scores]:
        wanted = [trial for lr in missing for trial in trials.sweep(task, lr)]
        finish(wanted, f"sweep {task.key}")
    return best(task, sweep_scores(task))


def chosen(task: Task) -> float | None:
    """The learning rate that the sweep chose; None while it is not finished."""
    scores = sweep_scores(task)
    return best(task, scores) if all(scores.values()) else None


@dataclass(frozen=True)
class Comparison:
    """The finished runs of a task at one length, by compression, in the order of the seeds."""

    task: Task
    steps: int
    dense: list[Result]
    topk: list[Result]

    def scores(self, runs: list[Result]) -> list[float]:
        """Final scores on held-out data."""
        return [final_score(self.task, run) for run in runs]

    @property
    def differences(self) -> list[float]:
        """TopKEF's score less dense's, seed by seed."""
        pairs = zip(self.scores(self.topk), self.scores(self.dense), strict=True)
        return [topk - dense for topk, dense in pairs]

    @property
    def gaps(self) -> list[float]:
        """TopKEF's score over dense's, less 1, seed by seed."""
        pairs = zip(self.scores(self.topk), self.scores(self.dense), strict=True)
        return [topk / dense - 1 for topk, dense in pairs]


def comparison(task: Task, steps: int) -> Comparison | None:
    """The runs of this length; None unless all of them are finished."""
    lr = chosen(task)
    return None if lr is None else comparison_at(task, steps, lr)


def comparison_at(task: Task, steps: int, lr: float) -> Comparison | None:
    """The runs of this length at one learning rate; None unless all of them are finished."""
    dense, topk = (load(trials.compared(task, lr, steps, name)) for name in trials.COMPRESSIONS)
    complete = len(dense) == len(topk) == len(task.seeds)
    return Comparison(task, steps, dense, topk) if complete else None
