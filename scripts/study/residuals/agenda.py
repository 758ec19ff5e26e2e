"""What is trained: the digits on four ranks, with gradients that differ more and more."""

from __future__ import annotations

from dataclasses import dataclass

from horovod_topk.cli.compare.simulated.training import Job
from horovod_topk.core.run.substitute import parse
from study.workloads import workload

RANKS, STEPS, LR, RATIO, SEED = 4, 1000, 0.1, 0.01, 0  # the rate is the one of docs/frontier.md
IDLE_EVERY = 4


@dataclass(frozen=True)
class Run:
    """A run as those of docs/frontier.md, watched."""

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
