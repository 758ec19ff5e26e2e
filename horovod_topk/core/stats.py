"""What compression did, in numbers a user can check."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from horovod_topk.core.exchange import Exchange, Traffic
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
    between_bytes: int | None  # of `sent_bytes`, those to other nodes; None: nodes are not known
    node_bytes: int | None  # bytes that leave the busiest node, of all its ranks together
    flagged: tuple[str, ...]  # tensors with a non-finite gradient on some rank


@dataclass(frozen=True)
class Stats:
    """Totals and norms; see `TopKEF.stats`."""

    active: bool = False  # False: nothing is compressed, `skipped` says why
    ranks: int = 1  # world size of the process set
    exchange: str = "none"  # how payloads travel
    because: str = ""  # why "auto" chose that, or what few nodes make of it; else empty
    nodes: tuple[int, ...] = ()  # ranks on each node, where the exchange asks for nodes
    buckets: int = 0  # payloads a step
    steps: int = 0  # committed steps
    rolled_back: int = 0  # steps exchanged and then not taken
    elements: int = 0  # gradient elements of all planned tensors
    selected: int = 0  # values sent a step and rank
    payload_bytes: int = 0  # bytes handed to collectives a step and rank
    sent_bytes: int = 0  # bytes a rank sends a step, to ranks of its own node too
    dense_bytes: int = 0  # bytes a rank sends a step in the ring allreduce that this replaces
    between_bytes: int | None = None  # of `sent_bytes`, those to other nodes; None: not known
    node_bytes: int | None = None  # bytes a step that leave the busiest node, of all its ranks
    momentum: float = 0.0  # that is corrected, the optimizer's own if taken over; 0: none
    residual_norm: float = 0.0  # Euclidean, of what this rank keeps of its own gradients
    owned_norm: float = 0.0  # of what it keeps as an owner: of what is applied, or its node's sum
    gradient_norm: float = 0.0  # Euclidean, this rank's last gradient
    ratios: Mapping[str, float] = field(default_factory=dict)  # tensor -> its own, where it has one
    skipped: Mapping[str, str] = field(default_factory=dict)  # tensor or "*" -> why not compressed
    lost_ranks: int = 0  # of an elastic job, whose residuals were lost with them
    lost_norm: float = 0.0  # of these, about: as if they owed as much as the other ranks then did
    late: Mapping[str, int] = field(default_factory=dict)  # tensor -> steps it held its bucket back
    warnings: tuple[str, ...] = ()  # what was warned of for this optimizer, as in the log

    @property
    def reduction(self) -> float:
        """How many times fewer bytes a rank sends than a dense ring allreduce would."""
        return self.dense_bytes / self.sent_bytes if self.sent_bytes else 1.0


def count_step(
    step: int, committed: bool, traffic: Traffic, flagged: Iterable[str]
) -> StepCounters:
    """The counters of the step that ended as number `step`."""
    return StepCounters(step, committed, **asdict(traffic), flagged=tuple(flagged))


def describe(exchange: Exchange[Any]) -> str:
    """One line for the log."""
    because = f", {exchange.because}" if exchange.because else ""
    on = f" on nodes of {', '.join(map(str, exchange.nodes.sizes))}" if exchange.nodes else ""
    return f"exchange {exchange.kind} among {exchange.ranks} ranks{on}{because}"


def planned(plan: Plan, exchange: Exchange[Any]) -> Stats:
    """What is known of a step from its plan and exchange alone."""
    return Stats(
        active=True,
        ranks=exchange.ranks,
        exchange=exchange.kind,
        because=exchange.because,
        nodes=exchange.nodes.sizes if exchange.nodes is not None else (),
        buckets=len(plan.buckets),
        elements=sum(bucket.numel for bucket in plan.buckets),
        momentum=plan.config.momentum,
        ratios=plan.own_ratios(),
        **asdict(exchange.traffic(plan)),
    )
