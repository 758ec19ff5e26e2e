"""Trains the runs of the agenda and writes down what they measured."""

from __future__ import annotations

import json
import os
import statistics
import time
from typing import Any

import harness
import torch
from tqdm import tqdm

import launch
from horovod_topk.cli.compare.simulated.exchanges import Compressed
from study.residuals import bounds
from study.residuals.agenda import RATIO, RUNS, STEPS, Run
from study.residuals.watch import Norms, Watched

PATH = launch.ROOT / "docs" / "results" / "residuals.json"
EVERY = 5  # steps between two points of a curve; extremes are of all steps

Record = dict[str, Any]


def write() -> None:
    """All runs, one after another."""
    runs = [{"name": run.name, **train(run)} for run in tqdm(RUNS, unit="run")]
    record = {
        "environment": harness.environment({"torch": torch.__version__}),
        "time": time.strftime("%H:%M UTC", time.gmtime()),
        "load": [round(each, 1) for each in os.getloadavg()],
        "every": EVERY,
        "ratio": RATIO,
        "runs": runs,
    }
    PATH.write_text(json.dumps(record) + "\n")


def read() -> Record:
    """What `write` wrote."""
    record: Record = json.loads(PATH.read_text())
    return record


def train(run: Run, steps: int = STEPS) -> Record:
    """A run's score and each rank's norms."""
    job = run.job(steps)
    assert isinstance(job.exchange, Compressed)
    names = [name for name, _ in job.model.named_parameters()]
    watched = Watched(job.exchange, names, run.idle_every)
    job.exchange = watched
    for _ in range(steps):
        job.step()
    accuracy = job.score()["accuracy"]
    ranks = [_rank(norms) for norms in watched.norms]
    return {"steps": steps, "accuracy": accuracy, "ranks": ranks}


def _rank(norms: Norms) -> Record:
    return {
        "gradient": _curve(norms.gradient),
        "residual": _curve(norms.residual),
        "owned": _curve(norms.owned),
        "bound": _curve(list(bounds.along(RATIO, norms.gradient))),
        "largest_gradient": _short(max(norms.gradient)),
        "median_gradient": _short(statistics.median(norms.gradient)),
        "largest_residual": _short(max(norms.residual)),
        "last_residual": _short(norms.residual[-1]),
        "largest_owned": _short(max(norms.owned)),
        "median_contraction": _short(statistics.median(norms.contraction)),
        "least_contraction": _short(min(norms.contraction)),
        "largest_bound": _short(max(bounds.along(RATIO, norms.gradient))),
    }


def _curve(values: list[float]) -> list[float]:
    return [_short(value) for value in values[EVERY - 1 :: EVERY]]


def _short(value: float) -> float:
    """Four digits are more than anyone reads off."""
    return float(f"{value:.4g}")
