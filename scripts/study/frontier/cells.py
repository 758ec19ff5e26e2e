"""One training run of the study, and what its result looks like on disk."""

from __future__ import annotations

from dataclasses import dataclass

from horovod_topk.methods.topk import TopK

DENSE = "dense"
RANKS = 4


@dataclass(frozen=True)
class Cell:
    """A run: all that tells it from the others."""

    workload: str  # one of `study.frontier.workloads.WORKLOADS`
    optimizer: str  # sgd or adamw
    shards: str  # equal or skewed
    exchange: str  # as TopKEF names them, or dense
    values: str  # as TopKEF names them
    ratio: float
    lr: float  # peak
    steps: int
    seed: int
    evaluate_on: str = "held-out"
    ranks: int = RANKS
    momentum: float = 0.0  # of momentum correction, instead of the optimizer's
    warmup: int = 0  # steps of larger ratios
    without: str = ""  # a part that is left out; see `study.frontier.ablated`
    gather_ratio: float | None = None  # what owners of shards send back; None: as `ratio`
    follow_lr: bool = False  # whether residuals are rescaled where the learning rate changes

    @property
    def config(self) -> TopK:
        """The settings of TopKEF."""
        return TopK(
            ratio=self.ratio,
            values=self.values,
            exchange=self.exchange,
            momentum=self.momentum,
            warmup=self.warmup or None,
            gather_ratio=self.gather_ratio,
            follow_lr=self.follow_lr,
        )

    @property
    def name(self) -> str:
        """For progress bars."""
        how = f"{self.exchange} {self.values} {self.ratio:g}" + " corrected" * (self.momentum > 0)
        how += f" back {self.gather_ratio:g}" if self.gather_ratio else ""
        how += f" warm-up {self.warmup}" * (self.warmup > 0)
        how += " following" * self.follow_lr
        how += f" less {self.without}" * bool(self.without)
        return f"{self.workload} {self.optimizer} {self.shards} {how} seed {self.seed}"


def dense(
    workload: str,
    optimizer: str,
    shards: str,
    lr: float,
    steps: int,
    seed: int,
    evaluate_on: str = "held-out",
) -> Cell:
    """A run without compression."""
    return Cell(
        workload, optimizer, shards, DENSE, "float32", 1.0, lr, steps, seed, evaluate_on=evaluate_on
    )
