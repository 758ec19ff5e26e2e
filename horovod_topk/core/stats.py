"""Counters and norms of compression, for users: `StepCounters` and `Stats`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from horovod_topk.core.exchange import Exchange, Traffic
from horovod_topk.core.plan import Plan
from horovod_topk.core.residual import Squares


@dataclass(frozen=True)
class StepCounters:
    """Counters of one step, which `on_step` hands to its callbacks. No device is waited for."""

    step: int  # steps that have ended so far, this one included
    committed: bool  # False: rolled back, residuals are as they were before the step
    selected: int  # gradient elements that this rank sent
    payload_bytes: int  # bytes that this rank handed to collectives
    sent_bytes: int  # bytes that this rank sent for them
    dense_bytes: int  # bytes that it would have sent in a ring allreduce of dense gradients
    between_bytes: int | None  # the part of `sent_bytes` sent to other nodes; None: not known
    node_bytes: int | None  # bytes that left the busiest node, from all its ranks; None: not known
    flagged: tuple[str, ...]  # names of tensors with a NaN or an infinity on some rank


@dataclass(frozen=True)
class Stats:
    """Totals, sizes and norms of one rank's compression: what `stats()` returns.

    Sizes "a step" are for one step at `ratio`. Norms are Euclidean, over all compressed tensors, in
    the units of the gradients.
    """

    active: bool = False  # False: nothing is compressed, and `skipped` says why
    ranks: int = 1  # number of ranks that exchange gradients
    exchange: str = "none"  # how payloads travel: "allgather", "sharded" or "hierarchical"
    because: str = ""  # why exchange="auto" chose that, or a note on the nodes; often empty
    nodes: tuple[int, ...] = ()  # number of ranks on each node, if the exchange uses nodes
    buckets: int = 0  # payloads a step
    steps: int = 0  # steps that were committed
    rolled_back: int = 0  # steps that were exchanged and not applied, such as after an overflow
    elements: int = 0  # gradient elements of all compressed tensors
    selected: int = 0  # elements that this rank sends a step
    payload_bytes: int = 0  # bytes that this rank hands to collectives a step
    sent_bytes: int = 0  # bytes that this rank sends a step, to ranks on its own node too
    dense_bytes: int = 0  # bytes that it would send a step in a ring allreduce of dense gradients
    between_bytes: int | None = None  # the part of `sent_bytes` sent to other nodes; None: unknown
    node_bytes: int | None = None  # bytes a step that leave the busiest node, from all its ranks
    momentum: float = 0.0  # the momentum that is corrected, taken over or given; 0: off
    residual_norm: float = 0.0  # of this rank's residuals: what it has not sent yet
    owned_norm: float = 0.0  # of the owner's residuals ("sharded" and "hierarchical")
    gradient_norm: float = 0.0  # of this rank's gradients in the last step; TensorFlow: last 16
    sent_share: float | None = None  # of the squares of gradient plus residual, what was sent then
    ratios: Mapping[str, float] = field(default_factory=dict)  # tensor -> ratio of its own
    skipped: Mapping[str, str] = field(default_factory=dict)  # tensor or "*" -> reason not to
    lost_ranks: int = 0  # elastic jobs: ranks whose residuals were lost with them
    lost_norm: float = 0.0  # elastic jobs: estimated norm of these residuals
    late: Mapping[str, int] = field(default_factory=dict)  # tensor -> steps it delayed its bucket
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


def measured(squares: Squares) -> dict[str, Any]:
    """What `Stats` says of the last step."""
    known = squares.compensated > 0.0
    return {
        "gradient_norm": math.sqrt(squares.gradient),
        "sent_share": 1.0 - squares.left / squares.compensated if known else None,
    }


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
