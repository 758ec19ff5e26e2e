"""`Step` compresses, exchanges and decodes every bucket of a plan, then commits or rolls back.

For each tensor on each rank, with residual e and gradient g (Stich 2018, Karimireddy 2019):

    compensate   a = e + g
    select       I = the k = ceil(ratio * n) indices with the largest |a|
    encode       p = encode(I, a[I])
    exchange     P = allgather(p)
    decode       g' = sum over ranks, in rank order, of decode(p_r), scaled
    update       e = a - decode(p), pending until the step commits

With momentum correction g is a velocity instead of a gradient; see `core.codec.momentum`.

A step begins every bucket (in any order), finishes every bucket, then commits or rolls back. The
caller owns the memory that a step reads and writes (`Storage`), and decides from the flags that
`finish` returns whether to commit. PyTorch and the simulated ranks decide on the host; TensorFlow
builds a step while it traces, and decides by a condition in the graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from horovod_topk.core.codec.codec import PayloadCodec
from horovod_topk.core.codec.measures import HOST, own_measures, total_of
from horovod_topk.core.codec.momentum import OptimizerMoments, velocities_of
from horovod_topk.core.codec.withheld import Limits
from horovod_topk.core.exchange.probe import Probe
from horovod_topk.core.exchange.protocol import BucketExchange, Exchange, Storage
from horovod_topk.core.exchange.reduce import declared
from horovod_topk.core.plan.buckets import BucketPlan, Plan
from horovod_topk.core.run.follower import Follower, FollowerArenas, Followers
from horovod_topk.core.run.timing import StepTimer
from horovod_topk.core.state.residual import Arenas, Squares
from horovod_topk.errors import NotLaunchedError, TopKError
from horovod_topk.ops import Ops

Array = TypeVar("Array")


@dataclass
class StepBucket(Generic[Array]):
    """One bucket's exchange and memory, and results of its last step."""

    plan: BucketPlan
    exchange: BucketExchange[Array]
    velocity: Arenas[Array] | None
    residuals: Sequence[Arenas[Array]]  # the owner's residuals, if only owners have residuals
    flags: Sequence[bool] = ()
    committed_last: bool = False  # whether the last step that began was committed
    measurable: bool = False  # whether arenas and payload still belong to one step
    measures: bool = False  # whether it has measures of its own arrays, computed in each step
    gradient: Any = None  # sum of squares of its gradients, in a sampled step
    exchanged: Sequence[Array] = ()  # that of each exchanged gradient, in a weighed step
    follower: Follower[Array] | None = None  # if the optimizer's update depends on the exchange
    follower_states: Mapping[str, Arenas[Array]] = field(default_factory=dict)  # by name


class Step(Generic[Array]):
    """Runs the steps of one optimizer, one after another, under one plan.

    Args:
        storage: returns each bucket's memory.
        number: returns a measure of the whole rank; see `core.codec.measures`.
        timer: gets the seconds of encoding and decoding, if steps run on the host.
        followers: those of the buckets, if the update depends on exchanges.

    Attributes:
        sent: ordinals of the buckets that have begun, and whose gradients are not replaced yet.
        received: ordinals of the buckets whose gradients are replaced, and whose candidates are
            neither committed nor rolled back.
        stages: number of times that buckets have to advance before they can be finished.
        probe: exchanges one bucket dense beside this step now and then; None: there is no probe.
    """

    def __init__(
        self,
        plan: Plan,
        storage: Callable[[BucketPlan], Storage[Array]],
        ops: Ops[Array],
        codec: PayloadCodec[Array],
        exchange: Exchange[Array],
        name: str,
        number: Callable[[str], Any] = lambda name: 0.0,
        timer: StepTimer | None = None,
        followers: Followers | None = None,
    ) -> None:
        self.name = name  # prefix of the collectives' names, equal on all ranks
        self._storage, self._ops, self._codec, self._exchange = storage, ops, codec, exchange
        self._followers = followers
        self._number, self._timer = number, timer or StepTimer()
        self.samples = self.weighs = False  # whether it sums up squares, for `sample`, `weights`
        self._sent_numbers: list[Any] = []  # the host's measures in the payloads; at first none
        self.probe: Probe[Array] | None = None
        self.sent: set[int] = set()
        self.received: set[int] = set()
        self._hold([self._make_bucket(each) for each in plan.buckets])

    @property
    def flagged(self) -> tuple[str, ...]:
        """Names of tensors in finished buckets that had a non-finite gradient on some rank.

        Flags have to be on the host.
        """
        return tuple(
            name
            for ordinal in sorted(self.received)
            for name in self._buckets[ordinal].plan.names(self._buckets[ordinal].flags)
        )

    def update_measures(self) -> None:
        """Update the host's measures in the payloads, before a step's first bucket begins."""
        first = min(self._buckets, default=-1)
        if first < 0 or self._buckets[first].measures:
            return
        numbers = [self._number(name) for name in self._buckets[first].plan.config.measures]
        if numbers != self._sent_numbers:
            self._sent_numbers = numbers
            for ordinal, bucket in self._buckets.items():
                own = numbers if ordinal == first else [0.0] * len(numbers)
                self._codec.measures.set(bucket.plan, own)

    def begin(self, ordinal: int, gradients: Sequence[Array]) -> None:
        """Compress a bucket and start its first collective. Writes no gradient and no residual.

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
        squares: Sequence[Array | None] = ()
        if bucket.follower is not None:
            bucket.follower.begin(gradients)
            squares = bucket.follower.squares()
            if bucket.plan.tensor_measures:
                self._codec.measures.set_tensor_numbers(bucket.plan, bucket.follower.message)
        if self.samples:
            bucket.gradient = total_of([self._ops.square(gradient) for gradient in gradients])
        own = None
        if bucket.velocity is not None:
            own = velocities_of(bucket.plan.config, bucket.velocity, self._ops)
        moments = OptimizerMoments(own, squares)
        bucket.exchange.send(gradients, f"{self.name}.{ordinal}", moments)
        self.sent.add(ordinal)
        timer.compressing += time.perf_counter() - timer.exposed - began

    def advance(self) -> None:
        """Start the next collective of every begun bucket; `finish` does so for all `stages`."""
        failed: TopKError | None = None
        for bucket in self._buckets.values():
            try:
                bucket.exchange.advance()
            except TopKError as error:  # other ranks wait for all of the buckets
                failed = failed or error
        if failed is not None:
            raise failed

    def finish(
        self, targets: Mapping[int, Sequence[Array]], gain: float = 1.0
    ) -> list[Sequence[bool]]:
        """Wait for buckets, one after another, and write the exchanged gradients.

        Args:
            targets: where to write, by the bucket's ordinal, such as the gradients that it began
                with.
            gain: factor of the results; residuals are not multiplied.

        Returns:
            Of each bucket, one flag a tensor: whether any rank had a NaN or an infinity there. In
            a graph this is a tensor.

        Raises:
            NotLaunchedError: a bucket has not begun.
            PayloadError, PlanMismatchError: a rank sent something else than its bucket.
        """
        for ordinal in targets:
            if ordinal not in self.sent:
                raise NotLaunchedError(
                    f"bucket {ordinal} was finished, and has not begun since it was finished last",
                    cure="Launch every bucket once before it is finished",
                )
        timer, codec = self._timer, self._codec
        began = time.perf_counter() - timer.exposed
        for _ in range(self.stages):
            self.advance()
        codec.waiting, last, arrived = [], [*targets][-1:], list[int]()
        try:
            for ordinal, each in targets.items():
                bucket = self._buckets[ordinal]
                self.sent.remove(ordinal)
                try:
                    bucket.flags = bucket.exchange.receive(each, gain)
                except BaseException:
                    bucket.exchange.drain()
                    raise
                arrived.append(ordinal)
                if codec.waiting and ordinal not in last:
                    continue  # to decode it with others
                if codec.waiting:
                    codec.decode_waiting()
                self.received.update(arrived)
                for done in arrived:
                    bucket, own = self._buckets[done], targets[done]
                    if self.probe is not None:
                        self.probe.finish(done, own, gain)
                    bucket.exchanged = [*map(self._ops.square, own)] if self.weighs else ()
                    if bucket.follower is not None:
                        message = codec.measures.tensor_numbers.pop(done, None)
                        bucket.follower.finish(own, gain, self._exchange.ranks, message)
                arrived.clear()
        finally:
            codec.waiting = None
        timer.decompressing += time.perf_counter() - timer.exposed - began
        return [self._buckets[ordinal].flags for ordinal in targets]

    def sample(self) -> list[Array]:
        """Sums of squares of a step with `samples` that is about to be committed, one number each.

        They are those of the gradients g and of the new residuals e'; if this rank encodes its
        gradients alone, also that of a = e + g. No device is waited for.
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

    def weights(self) -> dict[str, Array]:
        """Sums of squares of the exchanged gradients of a step with `weighs`, by tensor name."""
        return {
            tensor.spec.name: square
            for bucket in self._buckets.values()
            for tensor, square in zip(bucket.plan.gradients, bucket.exchanged, strict=False)
        }

    def followers(self) -> Iterator[tuple[Follower[Array], bool]]:
        """Followers of the buckets of the last step, each with whether that step is committed."""
        for ordinal, bucket in self._buckets.items():
            is_known = bucket.committed_last or ordinal in self.received
            if bucket.follower is not None and is_known:
                yield bucket.follower, bucket.committed_last

    def commit(self, without: Collection[str] = (), frozen: Collection[str] = ()) -> bool:
        """Make the candidates of all finished buckets the state; return whether there were any.

        The caller makes sure that no bucket is under way and no tensor is flagged.

        Args:
            without: names of the tensors whose gradient was not used: all of their state stays
                bitwise as it was before the step.
            frozen: names of the tensors whose gradient was used at a learning rate of 0. Residuals
                and states in their units stay; others change, as the optimizer's moments do.
        """
        if without or frozen:
            for ordinal in self.received:
                self._keep(self._buckets[ordinal].plan, without, {*without, *frozen})
        return self._end(committed=True)

    def _keep(self, bucket: BucketPlan, without: Collection[str], unmoved: Collection[str]) -> None:
        """Make the present state of some tensors of a bucket their candidates; see `commit`."""
        storage, specs = self._storage(bucket), declared(bucket)
        in_units = [own for name, own in storage.states.items() if specs[name].in_units]
        others = [own for name, own in storage.states.items() if not specs[name].in_units]
        kept = [*storage.residuals, *storage.owned, *in_units]
        for arenas in kept:
            arenas.keep(unmoved, self._ops)
        for arenas in others if storage.velocity is None else [*others, storage.velocity]:
            arenas.keep(without, self._ops)

    def roll_back(self) -> bool:
        """Discard all candidates, and leave the state as it was; return whether there were any."""
        return self._end(committed=False)

    def drain(self) -> None:
        """Wait for collectives under way, and discard their results."""
        for bucket in self._buckets.values():
            bucket.exchange.drain()
        if self.probe is not None:
            self.probe.drain()
        self.sent.clear()

    def drain_others(self, plan: Plan) -> None:
        """Drain the buckets that another plan does not have."""
        for ordinal, bucket in self._buckets.items():
            if bucket.plan not in plan.buckets:
                bucket.exchange.drain()
                self.sent.discard(ordinal)

    def replan(self, plan: Plan) -> None:
        """Switch to a plan with fewer tensors; exchanges of unchanged buckets go on."""
        same = {i: b for i, b in self._buckets.items() if b.plan in plan.buckets}
        self._hold([same.get(each.ordinal) or self._make_bucket(each) for each in plan.buckets])

    def squares(self) -> Squares:
        """Sums of squares of the last step. Waits for the device."""
        measurable = (each for each in self._buckets.values() if each.measurable)
        found = (each.exchange.squares(committed=each.committed_last) for each in measurable)
        return sum(found) or Squares()

    def forget_gradients(self) -> None:
        """Make `squares` return nothing until the next step, as the residuals have changed."""
        for bucket in self._buckets.values():
            bucket.measurable = False

    def _hold(self, buckets: Sequence[StepBucket[Array]]) -> None:
        """Replace the buckets of this step."""
        self._buckets = {each.plan.ordinal: each for each in buckets}
        self._sent_numbers = []
        self.stages = max((each.exchange.stages for each in buckets), default=0)

    def _make_bucket(self, plan: BucketPlan) -> StepBucket[Array]:
        storage = self._storage(plan)
        nodes: Any = self._exchange.owner.get("nodes", ())
        self._codec.withholding.limit(plan, Limits.of(plan, self._exchange.ranks, len(nodes)))
        first = plan.gradients[0]
        follower_states = () if plan.update_rule is None else plan.update_rule.states(first)
        states = {name: own for name, own in storage.states.items() if name not in follower_states}
        exchange = self._exchange.of(plan, replace(storage, states=states), self._codec)
        bucket = StepBucket(plan, exchange, storage.velocity, storage.residuals or storage.owned)
        bucket.measures = not set(plan.config.measures) <= set(HOST)
        if self._followers is not None and follower_states and plan.numel:
            bucket.follower_states = {name: storage.states[name] for name in follower_states}
            kept = storage.residuals, storage.owned, self._exchange.part or 0
            bucket.follower = self._followers.follower(
                plan, FollowerArenas(*kept, bucket.follower_states)
            )
        return bucket

    def _tell(self, bucket: StepBucket[Array], gradients: Sequence[Array]) -> None:
        """Compute the measures that this rank sends with a bucket."""
        is_first = bucket.plan.ordinal == min(self._buckets)
        number = self._number if is_first else None
        residuals = [each.residual for each in bucket.residuals]
        names = bucket.plan.config.needed_measures
        own = own_measures(names, gradients, residuals, number, self._ops)
        self._codec.measures.set(bucket.plan, own)

    def _end(self, *, committed: bool) -> bool:
        finished = [self._buckets[ordinal] for ordinal in sorted(self.received)]
        self.received.clear()
        for bucket in finished:
            if committed:
                bucket.exchange.swap()
                if bucket.velocity is not None:
                    bucket.velocity.swap()
                for arenas in bucket.follower_states.values():
                    arenas.swap()
                bucket.committed_last = True
            bucket.flags = ()
        return bool(finished)
