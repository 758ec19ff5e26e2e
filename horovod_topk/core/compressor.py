"""Error-feedback compression of one optimizer's gradients, bucket by bucket.

For each tensor on each rank, with residual e and gradient g (Stich 2018, Karimireddy 2019):

    compensate   a = e + g
    select       I = the k = ceil(ratio * n) indices with the largest |a|
    encode       p = encode(I, a[I])
    update       e = a - decode(p), pending until the step commits
    exchange     P = allgather(p)
    decode       g' = sum over ranks, in rank order, of decode(p_r), scaled

A step is: launch every bucket (in any order), finish every bucket, then commit or roll back. A
launch after a finish begins a new step, and rolls back one that nobody committed.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from horovod_topk.core.codec import Codec
from horovod_topk.core.exchange import Allgather, Pending, Traffic
from horovod_topk.core.plan import BucketPlan, Plan
from horovod_topk.core.residual import Arenas, ResidualRegistry
from horovod_topk.core.stats import StepCounters, count_step
from horovod_topk.errors import GradientChangedError, NotLaunchedError
from horovod_topk.ops import Ops

Array = TypeVar("Array")


class Phase(enum.Enum):
    """Where a bucket is within a step."""

    IDLE = "idle"
    SENT = "sent"  # launched, its gradients not yet replaced
    RECEIVED = "received"  # gradients replaced, candidate not yet committed


@dataclass
class Bucket(Generic[Array]):
    """One bucket's buffers and phase."""

    plan: BucketPlan
    payload: Array
    phase: Phase = Phase.IDLE
    pending: Pending[Array] | None = None
    flagged: tuple[str, ...] = ()
    committed_last: bool = False  # whether the last launched step was committed
    measurable: bool = False  # whether arenas and payload still belong to one step


class Compressor(Generic[Array]):
    """The state of Top-K with error feedback behind one optimizer."""

    def __init__(
        self,
        plan: Plan,
        ops: Ops[Array],
        codec: Codec[Array],
        exchange: Allgather[Array],
        name: str,
    ) -> None:
        self.plan = plan
        self.registry = ResidualRegistry(plan, ops)
        self.name = name
        self.steps = 0
        self.rolled_back = 0
        self._ops = ops
        self._codec = codec
        self._exchange = exchange
        self._callbacks: list[Callable[[StepCounters], None]] = []
        self._buckets = {b.ordinal: self._make_bucket(b) for b in plan.buckets}

    def phase(self, ordinal: int) -> Phase:
        """Where a bucket is within a step."""
        return self._buckets[ordinal].phase

    def launch(self, ordinal: int, gradients: Sequence[Array]) -> None:
        """Compress a bucket and start its exchange. Writes no gradient and no residual.

        Args:
            ordinal: the bucket.
            gradients: one a tensor, in the plan's order, of the planned shapes.
        """
        if any(bucket.phase is Phase.RECEIVED for bucket in self._buckets.values()):
            self.rollback()
        bucket = self._buckets[ordinal]
        self._drain(bucket)
        arenas = self.registry.arenas(ordinal)
        self._codec.encode(arenas, gradients, bucket.payload)
        bucket.committed_last, bucket.measurable = False, True
        bucket.pending = self._exchange.launch(bucket.payload, f"{self.name}.{ordinal}")
        bucket.phase = Phase.SENT

    def finish(
        self, ordinal: int, gradients: Sequence[Array], targets: Sequence[Array] | None = None
    ) -> None:
        """Wait for a bucket and replace its gradients by the exchanged ones.

        Args:
            ordinal: the bucket.
            gradients: those that were launched.
            targets: where to write; the gradients themselves by default.

        Raises:
            NotLaunchedError: nothing is under way for this bucket.
            GradientChangedError: a gradient is not what was launched.
            PayloadError, PlanMismatchError: a rank sent something else than this bucket.
        """
        bucket = self._buckets[ordinal]
        arenas = self.registry.arenas(ordinal)
        if bucket.pending is None:
            raise NotLaunchedError(
                f"bucket {ordinal} was finished in phase {bucket.phase.value!r}",
                cure="Launch every bucket once before it is finished",
            )
        gathered = bucket.pending.wait()
        bucket.pending = None
        self._check_unchanged(arenas, gradients, bucket.payload)
        self._exchange.check_length(self._ops.numel(gathered), bucket.plan)
        flags = self._codec.decode(
            bucket.plan,
            gathered,
            1.0 / self._exchange.ranks if self.plan.reduction == "average" else 1.0,
            gradients if targets is None else targets,
        )
        bucket.flagged = bucket.plan.names(flags)
        bucket.phase = Phase.RECEIVED

    def commit(self) -> bool:
        """End the step: what was not sent becomes the residual, unless a tensor was flagged.

        Returns:
            Whether the residuals changed. A call without a finished bucket does nothing.
        """
        if any(bucket.phase is Phase.SENT for bucket in self._buckets.values()):
            return False
        received = list(self._received())
        if any(bucket.flagged for bucket in received):
            self.rollback()
            return False
        for bucket in received:
            self.registry.arenas(bucket.plan.ordinal).swap()
            bucket.committed_last = True
        self._end_step(received, committed=True)
        return bool(received)

    def rollback(self) -> None:
        """End the step: residuals stay as they were before it, bit for bit."""
        self._end_step(list(self._received()), committed=False)

    def abandon(self) -> None:
        """Forget a step in any phase; collectives under way are waited for."""
        for bucket in self._buckets.values():
            self._drain(bucket)
        self.rollback()

    def replan(self, plan: Plan) -> None:
        """Take on a plan with fewer tensors; residuals of the others are kept."""
        self.registry.replan(plan)
        self.plan = plan
        kept = {i: b for i, b in self._buckets.items() if b.plan in plan.buckets}
        for ordinal in self._buckets.keys() - kept.keys():
            self._drain(self._buckets[ordinal])
        self._buckets = {
            b.ordinal: kept.get(b.ordinal) or self._make_bucket(b) for b in plan.buckets
        }

    @property
    def ranks(self) -> int:
        """How many ranks exchange."""
        return self._exchange.ranks

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take on residuals; a step under way is abandoned.

        Raises:
            StateDictError: a residual does not fit; nothing has changed.
        """
        self.registry.check(state)
        self.abandon()
        self.registry.load_state_dict(state)
        self._forget_gradients()

    def reset(self) -> None:
        """Set every residual to zero; a step under way is abandoned."""
        self.abandon()
        self.registry.reset()
        self._forget_gradients()

    def on_step(self, callback: Callable[[StepCounters], None]) -> None:
        """Call `callback` at the end of every step, committed or rolled back."""
        self._callbacks.append(callback)

    def traffic(self) -> Traffic:
        """Bytes of this rank, each step."""
        return self._exchange.traffic(self.plan)

    def residual_norm(self) -> float:
        """Euclidean norm of all residuals. Waits for the device."""
        arenas = (self.registry.arenas(bucket.ordinal) for bucket in self.plan.buckets)
        return math.hypot(*(self._ops.norm(a.residual) for a in arenas))

    def gradient_norm(self) -> float:
        """Euclidean norm of the gradients launched last. Waits for the device."""
        return math.hypot(*(self._bucket_norm(b) for b in self._buckets.values()))

    def _forget_gradients(self) -> None:
        for bucket in self._buckets.values():
            bucket.measurable = False

    def _bucket_norm(self, bucket: Bucket[Array]) -> float:
        if not bucket.measurable:
            return 0.0
        arenas = self.registry.arenas(bucket.plan.ordinal)
        before, after = arenas.residual, arenas.candidate
        if bucket.committed_last:
            before, after = after, before
        return self._codec.gradient_norm(bucket.plan, before, after, bucket.payload)

    def _make_bucket(self, plan: BucketPlan) -> Bucket[Array]:
        return Bucket(plan, self._codec.new_payload(plan))

    def _received(self) -> Iterator[Bucket[Array]]:
        return (b for b in self._buckets.values() if b.phase is Phase.RECEIVED)

    def _check_unchanged(
        self, arenas: Arenas[Array], gradients: Sequence[Array], payload: Array
    ) -> None:
        if self._codec.unchanged(arenas, gradients, payload):
            return
        names = ", ".join(t.spec.name for t in arenas.plan.tensors[:3])
        raise GradientChangedError(
            f"a gradient of bucket {arenas.plan.ordinal} ({names}, ...) is not the one that was "
            "sent",
            cure="Clip, unscale or edit gradients after optimizer.synchronize(), then step inside "
            "optimizer.skip_synchronize()",
        )

    def _drain(self, bucket: Bucket[Array]) -> None:
        """Let a collective that nobody will read come to its end."""
        if bucket.pending is not None:
            bucket.pending.wait()
        bucket.pending = None
        if bucket.phase is Phase.SENT:
            bucket.phase = Phase.IDLE

    def _end_step(self, received: Sequence[Bucket[Array]], *, committed: bool) -> None:
        if not received:
            return
        flagged = tuple(name for bucket in received for name in bucket.flagged)
        for bucket in received:
            bucket.phase, bucket.flagged = Phase.IDLE, ()
        self.steps += committed
        self.rolled_back += not committed
        counters = count_step(self.steps + self.rolled_back, committed, self.traffic(), flagged)
        for callback in self._callbacks:
            callback(counters)
