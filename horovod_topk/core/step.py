"""One training step over one plan: compress every bucket, exchange it, decode it, commit or not.

For each tensor on each rank, with residual e and gradient g (Stich 2018, Karimireddy 2019):

    compensate   a = e + g
    select       I = the k = ceil(ratio * n) indices with the largest |a|
    encode       p = encode(I, a[I])
    exchange     P = allgather(p)
    decode       g' = sum over ranks, in rank order, of decode(p_r), scaled
    update       e = a - decode(p), pending until the step commits

With momentum correction g is a velocity instead; see `horovod_topk.core.momentum`.

A step begins every bucket (in any order), finishes every bucket, then commits or rolls back. The
caller owns the memory that a step reads and writes (`Storage`), and decides from the flags that
`finish` returns whether to commit. PyTorch and the simulated ranks decide on the host; TensorFlow
builds a step while it traces, and decides by a condition in the graph.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from horovod_topk.core.codec import PayloadCodec
from horovod_topk.core.exchange import Exchange
from horovod_topk.core.momentum import Correction
from horovod_topk.core.plan import BucketPlan, Plan
from horovod_topk.core.probe import Probe
from horovod_topk.core.residual import Arenas
from horovod_topk.core.route import Route
from horovod_topk.errors import GradientChangedError, NotLaunchedError, TopKError
from horovod_topk.ops import Ops

Array = TypeVar("Array")


class Phase(enum.Enum):
    """Progress of one bucket within a step."""

    IDLE = "idle"
    SENT = "sent"  # begun, its gradients not yet replaced
    RECEIVED = "received"  # gradients replaced, candidate not yet committed


@dataclass(frozen=True)
class Storage(Generic[Array]):
    """Memory of one bucket that lasts from step to step, owned by the caller."""

    residuals: Sequence[Arenas[Array]]  # one for each plan of `Exchange.holders`
    owned: Sequence[Arenas[Array]] = ()  # owner's residuals, one for each plan of `Exchange.owned`
    velocity: Arenas[Array] | None = None  # with momentum correction
    states: Mapping[str, Arenas[Array]] = field(default_factory=dict)  # the method's own, by name


@dataclass
class Bucket(Generic[Array]):
    """One bucket's exchange and phase."""

    plan: BucketPlan
    route: Route[Array]
    velocity: Arenas[Array] | None
    probe: Probe[Array] | None
    phase: Phase = Phase.IDLE
    flags: Sequence[bool] = ()
    committed_last: bool = False  # whether the last step that began was committed
    measurable: bool = False  # whether arenas and payload still belong to one step


class Step(Generic[Array]):
    """The step of one optimizer under one plan, again and again.

    Args:
        plan: the buckets.
        storage: gives each bucket's memory.
        ops, codec, exchange: what arrays are computed, encoded and exchanged with.
        name: prefix of the collectives' names, equal on all ranks.
        probes: whether to check that gradients do not change while their bucket is under way. In a
            graph they cannot.
    """

    def __init__(
        self,
        plan: Plan,
        storage: Callable[[BucketPlan], Storage[Array]],
        ops: Ops[Array],
        codec: PayloadCodec[Array],
        exchange: Exchange[Array],
        name: str,
        *,
        probes: bool = True,
    ) -> None:
        self.name = name
        self._storage, self._ops, self._codec, self._exchange = storage, ops, codec, exchange
        self._correction = Correction(plan.config, ops)
        self._probes = probes
        self._buckets = {b.ordinal: self._make_bucket(b) for b in plan.buckets}

    @property
    def is_under_way(self) -> bool:
        """Whether a bucket has begun and is not finished."""
        return any(bucket.phase is Phase.SENT for bucket in self._buckets.values())

    @property
    def is_open(self) -> bool:
        """Whether a finished bucket is neither committed nor rolled back."""
        return any(bucket.phase is Phase.RECEIVED for bucket in self._buckets.values())

    @property
    def stages(self) -> int:
        """How often buckets have to advance before they can be finished."""
        return self._exchange.turns

    @property
    def flagged(self) -> tuple[str, ...]:
        """Tensors of finished buckets that had a non-finite gradient on some rank.

        Only where flags are on the host.
        """
        return tuple(
            name
            for bucket in self._buckets.values()
            if bucket.phase is Phase.RECEIVED
            for name in bucket.plan.names(bucket.flags)
        )

    def phase(self, ordinal: int) -> Phase:
        """Progress of one bucket within the step."""
        return self._buckets[ordinal].phase

    def begin(self, ordinal: int, gradients: Sequence[Array]) -> None:
        """Compress a bucket and start its first collective. Writes no gradient and no residual.

        Args:
            ordinal: the bucket.
            gradients: one a tensor, in the plan's order, of the planned shapes.
        """
        bucket = self._buckets[ordinal]
        self._drain(bucket)
        bucket.committed_last, bucket.measurable = False, True
        name, velocity = f"{self.name}.{ordinal}", bucket.velocity
        if bucket.probe is not None:
            bucket.probe.take(gradients)
        if velocity is None:
            bucket.route.send(gradients, name)
        else:
            bucket.route.send(self._correction.correct(velocity, gradients), name)
            self._correction.mask(velocity, bucket.route.clear)
        bucket.phase = Phase.SENT

    def advance(self) -> None:
        """Start the next collective of every bucket under way; `finish` does so for all `stages`.

        Raises:
            PayloadError, PlanMismatchError: a rank sent something else than a bucket.
        """
        failed: TopKError | None = None
        for bucket in self._buckets.values():
            try:
                bucket.route.advance()
            except TopKError as error:  # other ranks wait for all of the buckets
                failed = failed or error
        if failed is not None:
            raise failed

    def finish(
        self,
        ordinal: int,
        gradients: Sequence[Array],
        targets: Sequence[Array] | None = None,
        gain: float = 1.0,
    ) -> Sequence[bool]:
        """Wait for a bucket and replace its gradients by the exchanged ones.

        Args:
            ordinal: the bucket.
            gradients: those that it began with.
            targets: where to write; the gradients themselves by default.
            gain: what to multiply the result by; residuals stay in the units of `gradients`.

        Returns:
            One flag a tensor: whether any rank had a NaN or an infinity there. A graph gives a
            tensor.

        Raises:
            NotLaunchedError: nothing is under way for this bucket.
            GradientChangedError: a gradient is not what the bucket began with.
            PayloadError, PlanMismatchError: a rank sent something else than this bucket.
        """
        bucket = self._buckets[ordinal]
        if not bucket.route.is_under_way:
            raise NotLaunchedError(
                f"bucket {ordinal} was finished in phase {bucket.phase.value!r}",
                cure="Launch every bucket once before it is finished",
            )
        for _ in range(self.stages):
            self.advance()
        bucket.route.wait()
        _check_unchanged(bucket, gradients)
        bucket.flags = bucket.route.receive(gradients if targets is None else targets, gain)
        bucket.phase = Phase.RECEIVED
        return bucket.flags

    def commit(self) -> bool:
        """Make the candidates of all finished buckets the state.

        The caller has seen to it that no bucket is under way and no tensor is flagged.

        Returns:
            Whether there was a finished bucket.
        """
        return self._end(committed=True)

    def roll_back(self) -> bool:
        """Forget all candidates: the state stays as it was before the step, bit for bit.

        Returns:
            Whether there was a finished bucket.
        """
        return self._end(committed=False)

    def drain(self) -> None:
        """Wait for collectives under way, and forget what they bring."""
        for bucket in self._buckets.values():
            self._drain(bucket)

    def drain_others(self, plan: Plan) -> None:
        """Drain the buckets that another plan has not."""
        for bucket in self._buckets.values():
            if bucket.plan not in plan.buckets:
                self._drain(bucket)

    def replan(self, plan: Plan) -> None:
        """Take on a plan with fewer tensors; unchanged buckets stay in their phase."""
        same = {i: b for i, b in self._buckets.items() if b.plan in plan.buckets}
        self._buckets = {
            b.ordinal: same.get(b.ordinal) or self._make_bucket(b) for b in plan.buckets
        }

    def gradient_norm(self) -> float:
        """Euclidean norm of the gradients of the last step. Waits for the device."""
        measurable = (bucket for bucket in self._buckets.values() if bucket.measurable)
        return math.hypot(
            *(bucket.route.gradient_norm(committed=bucket.committed_last) for bucket in measurable)
        )

    def forget_gradients(self) -> None:
        """Have no gradient norm until the next step: the residuals have changed."""
        for bucket in self._buckets.values():
            bucket.measurable = False

    def _make_bucket(self, plan: BucketPlan) -> Bucket[Array]:
        storage, ops = self._storage(plan), self._ops
        memory = storage.residuals, storage.owned, storage.states
        route = self._exchange.route(plan, *memory, ops, self._codec)
        return Bucket(plan, route, storage.velocity, Probe(ops) if self._probes else None)

    def _drain(self, bucket: Bucket[Array]) -> None:
        """Let a collective that nobody will read come to its end."""
        bucket.route.drain()
        if bucket.phase is Phase.SENT:
            bucket.phase = Phase.IDLE

    def _end(self, *, committed: bool) -> bool:
        finished = [b for b in self._buckets.values() if b.phase is Phase.RECEIVED]
        for bucket in finished:
            if committed:
                bucket.route.swap()
                if bucket.velocity is not None:
                    bucket.velocity.swap()
                bucket.committed_last = True
            bucket.phase, bucket.flags = Phase.IDLE, ()
        return bool(finished)


def _check_unchanged(bucket: Bucket[Array], gradients: Sequence[Array]) -> None:
    """Refuse gradients that are not those that the bucket began with."""
    if bucket.probe is None or bucket.probe.still(gradients):
        return
    names = ", ".join(t.spec.name for t in bucket.plan.tensors[:3])
    raise GradientChangedError(
        f"a gradient of bucket {bucket.plan.ordinal} ({names}, ...) is not the one that was sent",
        cure="Clip, unscale or edit gradients after optimizer.synchronize(), then step inside "
        "optimizer.skip_synchronize()",
    )
