"""The rounds of one bucket: a method of rounds has its arrays summed over all ranks.

Each round is an exchange of arrays that are sent whole, by another exchange: sharded, where their
elements go to their owners, which add them up in rank order and send the sums or means to all
ranks; an allgather, where every rank adds them up in rank order; or Horovod's own allreduce. So a
round has the digests and flags of that exchange. After a sharded round or an allgather, which give
the same sums, every rank has the same bits.

A flagged tensor is sent as NaN in the remaining rounds, and becomes NaN on every rank. If every
tensor of a bucket is flagged, the bucket ends after that round: every rank sees the same flags, and
no rank waits for a round that another one has left out. (A graph runs all rounds, on NaN.) So a
rank that fails ends the step for all: if its method raises, it cannot read a payload, or it
abandons the step, it sends flags for every tensor in the next round that others wait for, and takes
part in no later round.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from horovod_topk.core.codec.codec import PayloadCodec
from horovod_topk.core.codec.momentum import NO_MOMENTS, OptimizerMoments, correct
from horovod_topk.core.exchange.protocol import (
    BucketExchange,
    Exchange,
    Storage,
    Traffic,
    plan_of_arrays,
    ring_allreduce_bytes,
)
from horovod_topk.core.plan.buckets import WIDTH, BucketPlan, Plan
from horovod_topk.core.state.residual import Arenas, NarrowArenas
from horovod_topk.errors import TopKError
from horovod_topk.methods.protocol import (
    EVERYTHING,
    Method,
    Piece,
    Placed,
    Product,
    Rounds,
    StateSpec,
    Work,
)

Array = TypeVar("Array")


@dataclass(frozen=True, kw_only=True)
class Whole(Rounds):
    """Gradients that are added up as they are, in one round."""

    id: ClassVar[int] = 0
    rounds: ClassVar[int] = 1
    min_numel: int = EVERYTHING

    @classmethod
    def beside(cls, config: Method) -> Whole:
        """What another method's settings say of the tensors and the optimizer."""
        of_levels = "warmup", "ratios", "schedule"
        own = config.common(without=of_levels)
        return cls(**own | {"exchange": "reduce", "min_numel": EVERYTHING})


def round_plan(bucket: BucketPlan, i: int) -> BucketPlan:
    """The plan of the arrays of round i of a bucket, which are sent whole.

    The first round carries the bucket's measures.
    """
    method, measures = _method(bucket), () if i else bucket.measures
    counts = [_elements(method, piece, i) for piece in bucket.tensors]
    identity = [method.id, method.agreed(), i]
    return plan_of_arrays(bucket, counts, identity, measures=measures)


def round_plans(bucket: BucketPlan) -> list[BucketPlan]:
    """The plans of all rounds of a bucket."""
    return [round_plan(bucket, i) for i in range(_method(bucket).rounds)]


class ReduceExchange(Exchange[Array]):
    """Arrays of a method of rounds are summed by another exchange, round after round."""

    def __init__(self, by: Exchange[Array]) -> None:
        super().__init__(by.collective, by.nodes, by.because)
        self._by = by

    @property
    def kind(self) -> str:
        """`Exchange.kind`: "reduce" if owners add up, else that of the exchange of a round."""
        return "reduce" if self._by.parts else self._by.kind

    def of(
        self, bucket: BucketPlan, own: Storage[Array], codec: PayloadCodec[Array]
    ) -> BucketExchange[Array]:
        """`Exchange.of`: the rounds of the bucket's method."""
        return ReducedBucket(bucket, own, codec, self._by)

    def buffer_bytes(self, plan: Plan) -> int:
        """`Exchange.buffer_bytes`: payloads and sums of every round, and arenas that stay zero."""
        rounds = _rounds(plan)
        arenas = [
            arena
            for each in rounds.buckets
            for arena in (*self._by.holders(each), *self._by.owned(each))
        ]
        unused = sum(2 * WIDTH[arena.residual_dtype] * arena.numel for arena in arenas)
        return self._by.buffer_bytes(rounds) + unused

    def _count(self, plan: Plan) -> Traffic:
        """Bytes of a step: those of all rounds."""
        dense_bytes = sum(bucket.dense_bytes for bucket in plan.buckets)
        dense_bytes = ring_allreduce_bytes(dense_bytes, self.ranks)
        return replace(self._by.traffic(_rounds(plan)), dense_bytes=dense_bytes)


def _rounds(plan: Plan) -> Plan:
    """A plan whose buckets are the rounds of all buckets."""
    rounds = [each for bucket in plan.buckets for each in round_plans(bucket)]
    return replace(plan, buckets=tuple(rounds))


class ReducedBucket(BucketExchange[Array]):
    """`BucketExchange` of a method of rounds: one round after another.

    Args:
        by: the exchange that carries them.
    """

    def __init__(
        self,
        bucket: BucketPlan,
        own: Storage[Array],
        codec: PayloadCodec[Array],
        by: Exchange[Array],
    ) -> None:
        (arenas,) = own.residuals
        super().__init__([arenas, *own.states.values()], codec)
        self._bucket, self._arenas, self._states = bucket, arenas, own.states
        self._method, self._plans = _method(bucket), round_plans(bucket)
        self._exchanges = [_directed(plan, codec, by) for plan in self._plans]
        self.stages = (
            len(self._exchanges) - 1 + sum(exchange.stages for exchange in self._exchanges)
        )
        self._round: int | None = None  # the running round; None: none
        self._advanced = 0  # how often its exchange was advanced
        self._ended = True  # whether its sums are taken, and no round follows
        self._flags: Sequence[bool] | None = None  # flags of all rounds so far
        self._works: list[Work[Array]] = []

    def send(
        self, gradients: Sequence[Array], name: str, moments: OptimizerMoments[Array] = NO_MOMENTS
    ) -> None:
        """`BucketExchange.send`: the first round."""
        ops, arenas = self._ops, self._arenas
        self._name, self._flags, self._works = name, None, []
        gradients = correct(gradients, moments.velocities, ops)
        self._opened = self._codec.withholding.open(arenas, gradients)
        arenas = self._opened.arenas
        pairs = zip(self._bucket.tensors, gradients, strict=True)
        for position, (piece, gradient) in enumerate(pairs):
            values = ops.view(arenas.candidate, piece.start, piece.stop)
            residual = ops.view(arenas.residual, piece.start, piece.stop)
            checked = ops.compensate(residual, gradient, values)
            key = self._codec.key(self._bucket, position)
            self._works.append(Work(values, checked, self._state_of(piece), key=key))
        self._start(0)

    def advance(self) -> None:
        """`BucketExchange.advance`: advance the round, or take its sums and start the next."""
        if self._round is None or self._ended:
            return
        exchange, following = self._exchanges[self._round], self._round + 1
        if self._advanced < exchange.stages:
            exchange.advance()
            self._advanced += 1
        elif following < len(self._exchanges) and self._take():
            self._start(following)

    def _wait(self) -> None:
        """Wait for the last round's sums; start the collectives that are missing."""
        assert self._round is not None
        last = len(self._exchanges) - 1
        while not self._ended and (self._round, self._advanced) != (
            last,
            self._exchanges[last].stages,
        ):
            self.advance()
        if not self._ended:
            self._take()
        self._round = None

    def drain(self) -> None:
        """`BucketExchange.drain`. Sends flags to ranks that go on, which end the step."""
        if self._round is None:
            return
        exchange = self._exchanges[self._round]
        if self._advanced < exchange.stages:
            exchange.drain()
        elif not self._ended:
            # TopKError: `_take` has sent flags to the other ranks. RuntimeError: a rank is lost.
            with contextlib.suppress(TopKError, RuntimeError):
                if self._take():
                    self._give_up(self._round + 1)
        self._round = None

    def receive(self, targets: Sequence[Array], gain: float = 1.0) -> Sequence[bool]:
        """`BucketExchange.receive`."""
        self._wait()
        ops, flags = self._ops, self._flags
        assert flags is not None
        pairs = zip(self._bucket.tensors, self._works, targets, strict=True)
        for position, (piece, work, target) in enumerate(pairs):
            applied, sent = self._finish(piece, work)
            self._apply(applied, gain, target, flags[position])
            if isinstance(sent, Placed):
                ops.subtract_at(work.values, sent.index, sent.values)
            elif isinstance(sent, Product):
                ops.subtract_product(work.values, sent.left, sent.right, sent.shape)
            else:
                ops.subtract_at(work.values, None, sent)
            self._keep_states(piece, work)
        self._opened.keep(ops)
        if isinstance(self._arenas, NarrowArenas):
            self._arenas.narrow()
        return flags

    def _start(self, i: int) -> None:
        """Send the method's arrays of round i.

        Raises:
            Exception: the method's error; flags are sent to the other ranks.
        """
        try:
            arrays = [self._array(i, at, piece) for at, piece in enumerate(self._bucket.tensors)]
        except Exception:
            self._give_up(i)
            raise
        for work, array in zip(self._works, arrays, strict=True):
            work.sent.append(array)
        self._round, self._advanced, self._ended = i, 0, False
        self._exchanges[i].send(arrays, f"{self._name}.{i}")

    def _array(self, i: int, position: int, piece: Piece) -> Array:
        """A tensor's array for round i; NaN if the tensor was flagged before."""
        ops, work = self._ops, self._works[position]
        count = _elements(self._method, piece, i)
        array = ops.zeros(count, self._bucket.residual_dtype, self._bucket.device)
        if count:
            whole = piece.whole
            sent = work.values if whole else self._method.send(ops, self._bucket, piece, i, work)
            ops.assign(array, sent)
            if i == 0 and not whole:  # the array may lack the element that is not finite
                ops.poison(array, work.checked)
            if self._flags is not None:
                ops.write_scaled(ops.clone(array), 1.0, array, self._flags[position])
        return array

    def _take(self) -> bool:
        """Take a round's sums; return False if all tensors are flagged, which ends the step.

        Raises:
            PayloadError, PlanMismatchError: the payloads are not this bucket's; flags are sent.
            RuntimeError: the collective failed; the step has ended here.
        """
        assert self._round is not None
        ops, plan = self._ops, self._plans[self._round]
        kind = plan.residual_dtype, plan.device
        reduced = [ops.zeros(tensor.numel, *kind) for tensor in plan.tensors]
        try:
            flags = self._exchanges[self._round].receive(reduced)
        except TopKError:
            self._give_up(self._round + 1)
            raise
        except RuntimeError:  # a rank is lost: nobody waits for flags
            self._round = None
            raise
        self._flags = flags if self._flags is None else ops.either(self._flags, flags)
        for work, array in zip(self._works, reduced, strict=True):
            work.reduced.append(array)
        if isinstance(self._flags, list) and all(self._flags):  # a graph has no list: it goes on
            self._ended = True
        return not self._ended

    def _give_up(self, i: int) -> None:
        """Leave the step: send flags in round i, which ranks that go on wait for, if it exists.

        The flags are for every tensor, and end the step on the other ranks.
        """
        self._round = None
        if i < len(self._exchanges):
            self._exchanges[i].abort(f"{self._name}.{i}")

    def _finish(
        self, piece: Piece, work: Work[Array]
    ) -> tuple[Array | Placed[Array] | Product[Array], Array | Placed[Array] | Product[Array]]:
        if piece.whole or not piece.numel:
            return work.reduced[0], self._ops.clone(work.values)
        if len(work.reduced) < len(self._exchanges):  # all tensors flagged: rounds were left out
            return self._ops.clone(work.values), self._ops.clone(work.values)
        return self._method.finish(self._ops, self._bucket, piece, work)

    def _apply(
        self,
        applied: Array | Placed[Array] | Product[Array],
        gain: float,
        target: Array,
        flag: bool,
    ) -> None:
        """Write the array that all ranks apply, times a gain, to a gradient; NaN if flagged."""
        ops = self._ops
        if isinstance(applied, Placed):
            ops.write_placed(applied.values, applied.index, gain, target, flag)
        elif isinstance(applied, Product):
            factors = applied.left, applied.right, applied.shape
            ops.write_product(*factors, gain, target, flag)
        else:
            ops.write_scaled(applied, gain, target, flag)

    def _state_of(self, piece: Piece) -> dict[str, Array]:
        return {
            name: self._ops.view(arenas.residual, *_stretch(arenas, piece))
            for name, arenas in self._states.items()
        }

    def _keep_states(self, piece: Piece, work: Work[Array]) -> None:
        """Write the method's next state, for a commit."""
        for name, arenas in self._states.items():
            following = work.following.get(name, work.state[name])
            self._ops.assign(self._ops.view(arenas.candidate, *_stretch(arenas, piece)), following)


def state_plan(bucket: BucketPlan, name: str) -> BucketPlan:
    """The layout of one named state, for every tensor of a bucket."""
    absent = StateSpec(0)
    counts = [states_of(bucket, piece).get(name, absent).numel for piece in bucket.tensors]
    plan = plan_of_arrays(bucket, counts, ["state", name])
    dtype = declared(bucket).get(name, absent).dtype
    if not dtype:
        return plan
    tensors = [replace(t, spec=replace(t.spec, dtype=dtype)) for t in plan.tensors]
    return replace(plan, residual_dtype=dtype, tensors=tuple(tensors))


def states_of(bucket: BucketPlan | Plan, piece: Piece) -> Mapping[str, StateSpec]:
    """What is kept for a tensor beside residuals: by the method, and by what follows it."""
    method: object = bucket.config
    own = method.state(piece) if isinstance(method, Rounds) and not piece.whole else {}
    return {**own, **({} if bucket.update_rule is None else bucket.update_rule.states(piece))}


def declared(plan: BucketPlan | Plan) -> dict[str, StateSpec]:
    """The states of a plan's tensors by name, each as its first tensor has it."""
    pieces = plan.tensors() if isinstance(plan, Plan) else plan.tensors
    found: dict[str, StateSpec] = {}
    for piece in pieces:
        found = {**states_of(plan, piece), **found}
    return dict(sorted(found.items()))


def _stretch(arenas: Arenas[Any], piece: Piece) -> tuple[int, int]:
    tensor = arenas.plan.tensors[piece.gradient]
    return tensor.start, tensor.stop


def _directed(
    plan: BucketPlan, codec: PayloadCodec[Array], by: Exchange[Array]
) -> BucketExchange[Array]:
    """The exchange of a round; its arenas stay zero, as arrays are sent whole."""
    ops = codec.ops

    def unused(plans: Sequence[BucketPlan]) -> list[Arenas[Array]]:
        sizes = [(each.numel, each.residual_dtype, each.device) for each in plans]
        pairs = zip(plans, sizes, strict=True)
        return [Arenas(each, ops.zeros(*size), ops.zeros(*size)) for each, size in pairs]

    return by.of(plan, Storage(unused(by.holders(plan)), unused(by.owned(plan))), codec)


def _elements(method: Rounds, piece: Piece, i: int) -> int:
    if piece.whole:
        return piece.numel if i == 0 else 0
    return method.elements(piece, i) if piece.numel else 0


def _method(bucket: BucketPlan) -> Rounds:
    method: object = bucket.config
    assert isinstance(method, Rounds)
    return method
