"""What compression did, in numbers a user can check."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

from horovod_topk.core.exchange import Traffic
from horovod_topk.core.plan import Plan


@dataclass(frozen=True)
class StepCounters:
    """One step, without touching a device. Handed to the callbacks of `on_step`."""

    step: int  # steps that ended so far, this one included
    committed: bool  # False: rolled back, the residuals are as before the step
    selected: int  # values handed to collectives by this rank
    payload_bytes: int  # bytes handed to collectives by this rank
    sent_bytes: int  # bytes this rank sends for them
    dense_bytes: int  # bytes this rank would send in a ring allreduce of the dense gradients
    flagged: tuple[str, ...]  # tensors with a non-finite gradient on some rank


@dataclass(frozen=True)
class Stats:
    """Totals and norms; see `TopKEF.stats`."""

    active: bool = False  # False: nothing is compressed, `skipped` says why
    ranks: int = 1  # world size of the process set
    exchange: str = "none"  # how payloads travel
    buckets: int = 0  # payloads a step
    steps: int = 0  # committed steps
    rolled_back: int = 0  # steps exchanged and then not taken
    elements: int = 0  # gradient elements of all planned tensors
    selected: int = 0  # values sent a step and rank
    payload_bytes: int = 0  # bytes handed to collectives a step and rank
    sent_bytes: int = 0  # bytes a rank sends a step
    dense_bytes: int = 0  # bytes a rank sends a step in the ring allreduce that this replaces
    residual_norm: float = 0.0  # Euclidean, over all tensors of this rank
    gradient_norm: float = 0.0  # Euclidean, this rank's last gradient
    skipped: Mapping[str, str] = field(default_factory=dict)  # tensor or "*" -> why not compressed
    late: Mapping[str, int] = field(default_factory=dict)  # tensor -> steps it held its bucket back

    @property
    def reduction(self) -> float:
        """How many times fewer bytes a rank sends than a dense ring allreduce would."""
        return self.dense_bytes / self.sent_bytes if self.sent_bytes else 1.0


def count_step(
    step: int, committed: bool, traffic: Traffic, flagged: Iterable[str]
) -> StepCounters:
    """The counters of the step that ended as number `step`."""
    return StepCounters(step, committed, **asdict(traffic), flagged=tuple(flagged))


def planned(plan: Plan, ranks: int, traffic: Traffic) -> Stats:
    """What is known of a step from its plan alone."""
    return Stats(
        active=True,
        ranks=ranks,
        exchange=plan.config.exchange,
        buckets=len(plan.buckets),
        elements=sum(bucket.numel for bucket in plan.buckets),
        **asdict(traffic),
    )
