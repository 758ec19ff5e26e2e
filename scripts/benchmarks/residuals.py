"""`make residuals`: norms of residuals over a training run, beside the bounds of theory (minutes).

Four ranks in this one process train the digits with shards that are alike, that differ, and with a
rank that has no data now and then; writes docs/results/residuals.json, docs/trouble.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import harness
import torch
from tqdm import tqdm

import pages
from benchmarks.residuals_watch import Norms, Watched, along
from horovod_topk.cli.compare.simulated.exchanges import Compressed
from horovod_topk.cli.compare.simulated.training import Job
from horovod_topk.core.run.substitute import parse
from study.workloads import workload

RANKS, STEPS, LR, RATIO, SEED = 4, 1000, 0.1, 0.01, 0  # the rate: frontier.toml
IDLE_EVERY = 4
EVERY = 5  # steps between two points of a curve; extremes are of all steps

Record = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """A run as those of scripts/study/frontier.toml, watched."""

    name: str
    title: str
    shards: str = "equal"  # or skewed
    exchange: str = "allgather"
    values: str = "float32"
    idle_every: int = 0  # the last rank has no data in every so many-th step; 0: always some

    def job(self, steps: int = STEPS) -> Job:
        """What to train."""
        options = {"optimizer": "sgd", "shards": self.shards, "lr": LR, "steps": steps}
        settings = f"ratio={RATIO}, values={self.values!r}, exchange={self.exchange!r}"
        settings += ", momentum=0, follow_lr=False, warmup=None"
        return Job(workload(task="digits", **options), parse(f"TopKEF({settings})"), RANKS, SEED)


RUNS = (
    Run("equal", "equal shards"),
    Run("skewed", "two or three digits a rank", shards="skewed"),
    Run("idle", f"rank 3 without data in every {IDLE_EVERY}th step", idle_every=IDLE_EVERY),
    Run("int4-sharded", "equal shards, int4, sharded", exchange="sharded", values="int4"),
    Run(
        "skewed-int4-sharded",
        "two or three digits a rank, int4, sharded",
        shards="skewed",
        exchange="sharded",
        values="int4",
    ),
)


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
    (pages.RESULTS / "residuals.json").write_text(json.dumps(record) + "\n")


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
        "bound": _curve(list(along(RATIO, norms.gradient))),
        "largest_gradient": _short(max(norms.gradient)),
        "median_gradient": _short(statistics.median(norms.gradient)),
        "largest_residual": _short(max(norms.residual)),
        "last_residual": _short(norms.residual[-1]),
        "largest_owned": _short(max(norms.owned)),
        "median_contraction": _short(statistics.median(norms.contraction)),
        "least_contraction": _short(min(norms.contraction)),
        "largest_bound": _short(max(along(RATIO, norms.gradient))),
    }


def _curve(values: list[float]) -> list[float]:
    return [_short(value) for value in values[EVERY - 1 :: EVERY]]


def _short(value: float) -> float:
    """Four digits are more than anyone reads off."""
    return float(f"{value:.4g}")


def main(arguments: Sequence[str]) -> int:
    """Train, then write the page."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args(arguments)
    torch.set_num_threads(1)  # sums keep their order from run to run
    write()
    pages.write("residuals")
    return 0
