"""`make residuals`: norms of residuals over a training run, beside the bounds of theory (minutes).

Four ranks in this one process train the digits with shards that are alike, that differ, and with a
rank that has no data now and then; writes docs/results/residuals.json, docs/trouble.md.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from typing import Any

import harness
import torch
from tqdm import tqdm

import pages
from benchmarks.watched import Watched
from horovod_topk.cli.compare.simulated.training import Job
from horovod_topk.core.run.substitute import parse
from pages import Values
from pages.markdown import table
from study.workloads import workload

RANKS, STEPS, LR, RATIO, SEED = 4, 1000, 0.1, 0.01, 0  # the rate: frontier.toml
IDLE_EVERY = 4

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


TITLES = {run.name: run.title for run in RUNS}


def train(run: Run, steps: int = STEPS) -> Record:
    """Train once, and return the score and each rank's largest norms."""
    job = run.job(steps)
    watched = Watched(job, [[name for name, _ in job.model.named_parameters()]], run.idle_every)
    for _ in range(steps):
        job.step()
    ranks = zip(_largest(watched.gradient), _largest(watched.residual), strict=True)
    return {
        "steps": steps,
        "accuracy": job.score()["accuracy"],
        "ranks": [{"largest_gradient": g, "largest_residual": e} for g, e in ranks],
    }


def _largest(norms: list[torch.Tensor]) -> list[float]:
    """Return each rank's largest norm, of four digits."""
    most: list[float] = torch.stack(norms).amax(dim=(0, 2)).tolist()
    return [float(f"{each:.4g}") for each in most]


def main(args: argparse.Namespace) -> int:
    """Train, then write the page."""
    torch.set_num_threads(1)  # sums keep their order from run to run
    record = {
        "environment": harness.environment({"torch": torch.__version__}),
        "ratio": RATIO,
        "runs": [{"name": run.name, **train(run)} for run in tqdm(RUNS, unit="run")],
    }
    (pages.RESULTS / "residuals.json").write_text(json.dumps(record) + "\n")
    pages.write("residuals")
    return 0


def karimireddy(delta: float) -> float:
    """Bound a residual's norm, in those of the largest gradient (Karimireddy et al. 2019).

    By Lemma 3, in units of the learning rate, which our residuals, of gradients, are not multiplied
    by. Top-K with k of n elements has delta = k / n.
    """
    return 2 * math.sqrt(1 - delta) / delta


def values(record: Record) -> Values:
    """Return the figures that the page shows, by name."""
    first = record["runs"][0]
    return dict(
        steps=first["steps"],
        ranks=len(first["ranks"]),
        lr=LR,
        ratio=record["ratio"],
        beside=_beside(record),
        **_reading(record),
    )


def worst_rank(run: Record) -> tuple[int, Record]:
    """The rank whose residual became the largest."""
    return max(enumerate(run["ranks"]), key=lambda each: each[1]["largest_residual"])


def _beside(record: Record) -> str:
    header = ["gradients", "accuracy", "largest gradient G", "largest residual", "in G"]
    header += ["Karimireddy's bound, in G"]
    return table(header, (_line(record["ratio"], run) for run in record["runs"]))


def _line(ratio: float, run: Record) -> list[str]:
    _, rank = worst_rank(run)
    largest, residual = rank["largest_gradient"], rank["largest_residual"]
    return [
        TITLES[run["name"]],
        f"{100 * run['accuracy']:.2f}%",
        f"{largest:.3g}",
        f"{residual:.3g}",
        f"{residual / largest:.2f}",
        f"{karimireddy(ratio):.0f}",
    ]


def _reading(record: Record) -> Values:
    runs = {run["name"]: run for run in record["runs"]}
    bound = karimireddy(record["ratio"])
    ranks = [rank for run in runs.values() for rank in run["ranks"]]
    idle, twin = runs["idle"]["ranks"][-1], runs["equal"]["ranks"][-1]
    return {
        "worst_share": max(
            100 * rank["largest_residual"] / (bound * rank["largest_gradient"]) for rank in ranks
        ),
        "idle": idle["largest_residual"] / twin["largest_residual"],
    }
