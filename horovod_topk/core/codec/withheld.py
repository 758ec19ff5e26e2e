"""Limits of float16 gradients: what float16 cannot hold stays in the residual.

Residuals are float32, so that what has waited may be more than float16 can hold. So exchanged
gradients are finite where those of dense training are, and so is the optimizer's momentum of what
has waited. A rank's own gradient is sent whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from horovod_topk.core.plan.buckets import BucketPlan
from horovod_topk.core.state.residual import Arenas, NarrowArenas
from horovod_topk.ops import Ops

Array = TypeVar("Array")

HALF = 65504.0  # the largest float16
# What has waited is sent up to a sixteenth of it: SGD's momentum buffer may have to hold the sum of
# 1 / (1 - momentum) such gradients. Gradients of the step itself are as in dense training.
WAITED = 16
# What rounding leaves room for: QSGD with the norm "l2" may double a value, formats with a scale
# may add 1/128.
ROUNDED, NARROW = {"float32": 1.0, "": 0.5}, 63 / 64


@dataclass(frozen=True)
class Limits:
    """The largest magnitudes that a bucket's float16 gradients are encoded with."""

    gradients: frozenset[int]  # positions of the float16 gradients
    by_direction: Mapping[str, tuple[float, float]]  # where something has waited, and elsewhere

    @classmethod
    def of(cls, plan: BucketPlan, ranks: int, nodes: int) -> Limits:
        """Return a bucket's limits: none if no gradient is float16 or nothing keeps the rest.

        nodes: number of nodes, if nodes exchange sums; else 0.
        """
        halves = (t.gradient for t in plan.tensors if t.spec.dtype == "float16")
        most = HALF * ROUNDED.get(getattr(plan.config, "values", ""), NARROW)
        is_mean = plan.reduction == "average"
        scales = {"direct": ranks, "gather": 1, "sums": max(1, nodes)}  # payloads added up
        by_direction = {}
        for direction, count in scales.items():
            share = most * (ranks if is_mean and direction != "gather" else 1) / count
            by_direction[direction] = share / WAITED, most if direction == "direct" else share
        return cls(frozenset(halves if plan.config.error_feedback else ()), by_direction)


@dataclass(slots=True)
class Opened(Generic[Array]):
    """A bucket's arenas while a step encodes."""

    own: Arenas[Array]
    arenas: Arenas[Array]  # `own`, but with the residual that the step may send
    rests: Sequence[tuple[Any, Array]] = ()  # a piece, and what it withholds of e + g

    def keep(self, ops: Ops[Array]) -> None:
        """Add what was withheld to the candidate, once the bucket is encoded."""
        for piece, rest in self.rests:
            candidate = ops.view(self.own.candidate, piece.start, piece.stop)
            ops.compensate(candidate, rest, candidate)


class Withholding(Generic[Array]):
    """Opens arenas for a step, and withholds what its payloads cannot hold."""

    def __init__(self, ops: Ops[Array]) -> None:
        self._ops = ops
        # By ordinal and method, as the arrays of rounds have another method.
        self.limits: dict[tuple[int, int], Limits] = {}

    def limit(self, plan: BucketPlan, limits: Limits) -> None:
        """Set the limits of a bucket, if it has any."""
        if limits.gradients:
            self.limits[plan.ordinal, plan.config.id] = limits

    def open(self, arenas: Arenas[Array], gradients: Sequence[Array]) -> Opened[Array]:
        """Decode a bucket's residual, and split e + g into what a step may send and the rest.

        Call `keep` once the bucket is encoded, and then `narrow` of the arenas. Nothing is to be
        done where there are no `limits` and the arenas are not narrow.
        """
        if isinstance(arenas, NarrowArenas):
            arenas.widen()
        bucket, ops = arenas.plan, self._ops
        limits = self.limits.get((bucket.ordinal, bucket.config.id))
        if limits is None or bucket.direction not in limits.by_direction:
            return Opened(arenas, arenas)
        rests = list[tuple[Any, Array]]()
        residual: Array | None = None
        for piece in bucket.tensors:
            if piece.gradient not in limits.gradients or not piece.numel:
                continue
            gradient = gradients[piece.gradient]
            if bucket.parts > 1:
                gradient = ops.shard(gradient, bucket.parts, piece.first)
            own = ops.view(arenas.residual, piece.start, piece.stop)
            split = ops.withheld(own, gradient, *limits.by_direction[bucket.direction])
            if split is not None:
                residual = ops.clone(arenas.residual) if residual is None else residual
                ops.assign(ops.view(residual, piece.start, piece.stop), split[0])
                rests.append((piece, split[1]))
        if residual is None:
            return Opened(arenas, arenas)
        return Opened(arenas, Arenas(bucket, residual, arenas.candidate), rests)
