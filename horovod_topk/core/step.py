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

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from horovod_topk.core.codec import PayloadCodec
from horovod_topk.core.exchange import BucketExchange, Exchange
from horovod_topk.core.measures import HOST, told, total_of
from horovod_topk.core.momentum import Correction, Momenta
from horovod_topk.core.plan import BucketPlan, Plan
from horovod_topk.core.probe import Probe
from horovod_topk.core.residual import Arenas, Squares
from horovod_topk.core.timing import StepTimer
from horovod_topk.errors import NotLaunchedError, TopKError
from horovod_topk.ops import Ops

Array = TypeVar("Array")


@dataclass(frozen=True)
class Storage(Generic[Array]):
    """Memory of one bucket that lasts from step to step, owned by the caller."""

    residuals: Sequence[Arenas[Array]]  # one for each plan of `Exchange.holders`
    owned: Sequence[Arenas[Array]] = ()  # owner's residuals, one for each plan of `Exchange.owned`
    velocity: Arenas[Array] | None = None  # with momentum correction
    states: Mapping[str, Arenas[Array]] = field(default_factory=dict)  # the method's own, by name


@dataclass
class Bucket(Generic[Array]):
    """One bucket's exchange, and what its last step has left."""

    plan: BucketPlan
    exchange: BucketExchange[Array]
    velocity: Arenas[Array] | None
    residuals: Sequence[Arenas[Array]]  # or the owner's, where only owners keep some
    flags: Sequence[bool] = ()
    units: Sequence[float] = (1.0,)  # of what users are given, one a tensor or one for all
    committed_last: bool = False  # whether the last step that began was committed
    measurable: bool = False  # whether arenas and payload still belong to one step
    measures: bool = False  # whether it tells of its own arrays, in each step
    gradient: Any = None  # sum of squares of its gradients, in a step that is sampled


class Step(Generic[Array]):
    """The step of one optimizer under one plan, again and again.

    Args:
        plan: the buckets.
        storage: gives each bucket's memory.
        ops, codec, exchange: what arrays are computed, encoded and exchanged with.
        name: prefix of the collectives' names, equal on all ranks.
        momenta: momentum by tensor; None: as the settings say.
        decay: gives a tensor's learning rate as a share of its largest one so far.
        number: gives a measure of the whole rank; see `horovod_topk.core.measures`.
        timer: gets the seconds of encoding and decoding, where steps run on the host.

    Attributes:
        sent: ordinals of the buckets that have begun, whose gradients are not replaced yet.
        received: of those whose gradients are replaced, and whose candidates are neither committed
            nor rolled back.
        stages: how often buckets have to advance before they can be finished.
        samples: whether squares of the step that begins are summed up, for `sample`.
        probe: exchanges a bucket dense beside this step now and then, if there is one.
    """

    def __init__(
        self,
        plan: Plan,
        storage: Callable[[BucketPlan], Storage[Array]],
        ops: Ops[Array],
        codec: PayloadCodec[Array],
        exchange: Exchange[Array],
        name: str,
        momenta: Momenta | None = None,
        decay: Callable[[str], float] = lambda name: 1.0,
        number: Callable[[str], Any] = lambda name: 0.0,
        timer: StepTimer | None = None,
    ) -> None:
        self.name = name
        self._storage, self._ops, self._codec, self._exchange = storage, ops, codec, exchange
        self._correction = Correction(plan.config, momenta or Momenta(plan.config), decay, ops)
        self._number, self.samples, self._timer = number, False, timer or StepTimer()
        self._told: list[Any] = []  # what the host has told; new payloads have nothing of it
        self.probe: Probe[Array] | None = None
        self.sent: set[int] = set()
        self.received: set[int] = set()
        self._hold([self._make_bucket(each) for each in plan.buckets])

    @property
    def flagged(self) -> tuple[str, ...]:
        """Tensors of finished buckets that had a non-finite gradient on some rank.

        Only where flags are on the host.
        """
        return tuple(
            name
            for ordinal in sorted(self.received)
            for name in self._buckets[ordinal].plan.names(self._buckets[ordinal].flags)
        )

    def turn(self) -> None:
        """Before a step's first bucket: note what the host tells other ranks, if it has changed."""
        first = min(self._buckets, default=-1)
        if first < 0 or self._buckets[first].measures:
            return
        numbers = [self._number(name) for name in self._buckets[first].plan.measures]
        if numbers != self._told:
            self._told = numbers
            for ordinal, bucket in self._buckets.items():
                told = numbers if ordinal == first else [0.0] * len(numbers)
                self._codec.tell(bucket.plan, told)

    def begin(self, ordinal: int, gradients: Sequence[Array]) -> None:
        """Compress a bucket and start its first collective. Writes no gradient and no residual.

        Args:
            ordinal: the bucket.
            gradients: one a tensor, in the plan's order, of the planned shapes.
        """
        bucket, timer = self._buckets[ordinal], self._timer
        if self.probe is not None:
            self.probe.begin(ordinal, gradients)
        began = time.perf_counter() - timer.exposed
        if ordinal in self.sent:
            bucket.exchange.drain()
        bucket.committed_last, bucket.measurable = False, True
        if bucket.measures:
            self._tell(bucket, gradients)
        if self.samples:
            bucket.gradient = total_of([self._ops.square(gradient) for gradient in gradients])
        velocities = None
        if bucket.velocity is not None:
            velocities = self._correction.of(bucket.velocity)
            bucket.units = self._correction.units(bucket.plan)
        bucket.exchange.send(gradients, f"{self.name}.{ordinal}", velocities)
        self.sent.add(ordinal)
        timer.compressing += time.perf_counter() - timer.exposed - began

    def advance(self) -> None:
        """Start the next collective of every bucket under way; `finish` does so for all `stages`.

        Raises:
            PayloadError, PlanMismatchError: a rank sent something else than a bucket.
        """
        failed: TopKError | None = None
        for bucket in self._buckets.values():
            try:
                bucket.exchange.advance()
            except TopKError as error:  # other ranks wait for all of the buckets
                failed = failed or error
        if failed is not None:
            raise failed

    def finish(
        self,
        ordinal: int,
        targets: Sequence[Array],
        gain: float = 1.0,
    ) -> Sequence[bool]:
        """Wait for a bucket and write the exchanged gradients.

        Args:
            ordinal: the bucket.
            targets: where to write, such as the gradients that it began with.
            gain: what to multiply the result by; residuals stay in the units that they have.

        Returns:
            One flag a tensor: whether any rank had a NaN or an infinity there. A graph gives a
            tensor.

        Raises:
            NotLaunchedError: the bucket has not begun.
            PayloadError, PlanMismatchError: a rank sent something else than this bucket.
        """
        if ordinal not in self.sent:
            raise NotLaunchedError(
                f"bucket {ordinal} was finished, and has not begun since it was finished last",
                cure="Launch every bucket once before it is finished",
            )
        timer = self._timer
        began = time.perf_counter() - timer.exposed
        for _ in range(self.stages):
            self.advance()
        bucket = self._buckets[ordinal]
        self.sent.remove(ordinal)
        try:
            if len(set(bucket.units)) == 1:
                bucket.flags = bucket.exchange.receive(targets, gain * bucket.units[0])
            else:
                bucket.flags = self._receive_each(bucket, targets, gain)
        except BaseException:
            bucket.exchange.drain()
            raise
        self.received.add(ordinal)
        timer.decompressing += time.perf_counter() - timer.exposed - began
        if self.probe is not None:
            self.probe.finish(ordinal, targets, gain)
        return bucket.flags

    def sample(self) -> list[Array]:
        """Sums of squares of a step with `samples` that is about to be committed, one number each.

        Of gradients and of what is left of them and the residuals; and of the two added up, where
        this rank encodes its gradients alone. No device is waited for.
        """
        ops, gradient, left, regained = self._ops, list[Any](), list[Any](), list[Any]()
        for bucket in self._buckets.values():
            gradient.append(bucket.gradient)
            left += [ops.square(each.candidate) for each in bucket.residuals]
            for pair in bucket.exchange.encoded():
                regained += self._codec.regained(*pair)
        if not left:
            return []
        sums = [total_of(gradient), total_of(left)]
        return [*sums, total_of([sums[1], *regained])] if regained else sums

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
            bucket.exchange.drain()
        if self.probe is not None:
            self.probe.drain()
        self.sent.clear()

    def drain_others(self, plan: Plan) -> None:
        """Drain the buckets that another plan has not."""
        for ordinal, bucket in self._buckets.items():
            if bucket.plan not in plan.buckets:
                bucket.exchange.drain()
                self.sent.discard(ordinal)

    def replan(self, plan: Plan) -> None:
        """Take on a plan with fewer tensors; what is under way for unchanged buckets goes on."""
        same = {i: b for i, b in self._buckets.items() if b.plan in plan.buckets}
        self._hold([same.get(each.ordinal) or self._make_bucket(each) for each in plan.buckets])

    def squares(self) -> Squares:
        """Sums of squares of the last step. Waits for the device."""
        measurable = (each for each in self._buckets.values() if each.measurable)
        return sum(
            (each.exchange.squares(committed=each.committed_last) for each in measurable),
            Squares(),
        )

    def forget_gradients(self) -> None:
        """Have no sums of squares until the next step: the residuals have changed."""
        for bucket in self._buckets.values():
            bucket.measurable = False

    def _receive_each(
        self, bucket: Bucket[Array], targets: Sequence[Array], gain: float
    ) -> Sequence[bool]:
        """`BucketExchange.receive`, where each tensor has units of its own."""
        flags = bucket.exchange.receive(targets, gain)
        for target, unit in zip(targets, bucket.units, strict=True):
            self._ops.write_scaled(self._ops.clone(target), unit, target, False)
        return flags

    def _hold(self, buckets: Sequence[Bucket[Array]]) -> None:
        """Have these buckets from here on."""
        self._buckets = {each.plan.ordinal: each for each in buckets}
        self._told = []
        self.stages = max((each.exchange.stages for each in buckets), default=0)

    def _make_bucket(self, plan: BucketPlan) -> Bucket[Array]:
        storage, ops = self._storage(plan), self._ops
        memory = storage.residuals, storage.owned, storage.states
        exchange = self._exchange.of(plan, *memory, ops, self._codec)
        bucket = Bucket(plan, exchange, storage.velocity, storage.residuals or storage.owned)
        bucket.measures = not set(plan.measures) <= set(HOST)
        return bucket

    def _tell(self, bucket: Bucket[Array], gradients: Sequence[Array]) -> None:
        """Measure what this rank tells the others with a bucket."""
        is_first = bucket.plan.ordinal == min(self._buckets)
        number = self._number if is_first else None
        residuals, count = (
            [each.residual for each in bucket.residuals],
            len(bucket.plan.config.measured),
        )
        names = bucket.plan.measures[: len(bucket.plan.measures) - count]
        self._codec.tell(bucket.plan, told(names, gradients, residuals, number, self._ops))

    def _end(self, *, committed: bool) -> bool:
        finished = [self._buckets[ordinal] for ordinal in sorted(self.received)]
        self.received.clear()
        for bucket in finished:
            if committed:
                bucket.exchange.swap()
                if bucket.velocity is not None:
                    bucket.velocity.swap()
                bucket.committed_last = True
            bucket.flags = ()
        return bool(finished)
