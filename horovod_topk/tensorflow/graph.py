"""One step of compression as a graph.

It is straight: encode every bucket, exchange, decode, then commit the residuals unless a rank
flagged a tensor. All that differs from step to step runs with the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from horovod_topk.core.clipping import local_threshold
from horovod_topk.core.codec import Codec
from horovod_topk.core.exchange import Exchange, HierarchicalExchange, ShardedExchange
from horovod_topk.core.hierarchy import Hierarchical
from horovod_topk.core.momentum import Correction
from horovod_topk.core.plan import BucketPlan, Plan, TensorPlan, TensorSpec
from horovod_topk.core.residual import Arenas
from horovod_topk.core.route import Collective, Direct, Sharded
from horovod_topk.core.route import Route as Way
from horovod_topk.core.schedule import Schedule
from horovod_topk.ops.tensorflow import Array, Buffer, TensorFlowOps


@dataclass(frozen=True)
class Route:
    """How the gradients of one set of variables travel."""

    specs: tuple[TensorSpec, ...]  # in the order of the variables
    plan: Plan
    prefix: str
    ordinal: int
    residuals: Mapping[str, Any]  # tensor name -> tf.Variable; shard after shard if sharded
    owned: Mapping[str, Any]  # of this rank's shards, if it owns any
    velocities: Mapping[str, Any]  # tensor name -> tf.Variable, with momentum correction
    units: Mapping[str, Any]  # tensor name -> tf.Variable, where residuals follow learning rates
    label: str = ""  # of the rung, if it is not the usual one

    @property
    def name(self) -> str:
        """The collectives' prefix, equal on all ranks."""
        return f"{self.prefix}.{self.ordinal}{self.label}"

    def at(self, ratio: float) -> Route:
        """The same at another rung."""
        if ratio == self.plan.config.ratio:
            return self
        schedule = Schedule(self.plan.config)  # in which ratios of single tensors are resolved
        plan = self.plan.under(schedule.settings(ratio))
        return replace(self, plan=plan, label=schedule.label(ratio))


@dataclass(frozen=True)
class Transport:
    """What takes buckets from rank to rank."""

    ops: TensorFlowOps
    codec: Codec[Array]
    collective: Collective[Array]
    exchange: Exchange[Array]


@dataclass(frozen=True)
class Bucket:
    """A bucket, while the graph is built: its way, and the arenas of its residuals."""

    plan: BucketPlan
    way: Way[Array]
    arenas: Sequence[Arenas[Array]]  # one, or one for each shard, or none: owners keep all
    owned: Arenas[Array] | None
    velocity: Arenas[Array] | None = None

    def send(self, gradients: Sequence[Array], name: str, correction: Correction[Array]) -> None:
        """Send the velocities that gradients make, or these themselves."""
        if self.velocity is None:
            self.way.send(gradients, name)
        else:
            self.way.send(correction.correct(self.velocity, gradients), name)
            correction.mask(self.velocity, self.way.clear)


def step(
    route: Route,
    gradients: Sequence[Any],
    transport: Transport,
    besides: Sequence[tuple[Any, Any]] = (),
    owed: Route | None = None,
) -> tuple[list[Any], Any]:
    """Exchange gradients, in the order of `route.specs`.

    besides: other variables, and what they become if residuals are committed.
    owed: the route with what its residuals are at this step, if not what they were left at.

    Returns:
        The exchanged gradients, and one flag a tensor, bucket by bucket: True where a rank had a
        NaN or an infinity. Residuals have then stayed as they were, bit for bit.
    """
    arrays: dict[str, Array] = {
        spec.name: Buffer(tf.ensure_shape(gradient, spec.shape))
        for spec, gradient in zip(route.specs, gradients, strict=True)
    }
    limit = route.plan.config.clip_norm
    if limit is not None:
        reduction, ranks = route.plan.reduction, transport.collective.size
        local = clipped(list(arrays.values()), local_threshold(limit, reduction, ranks))
        arrays = dict(zip(arrays, local, strict=True))
    buckets = [_bucket(owed or route, plan, transport) for plan in route.plan.buckets]
    if route.velocities:
        buckets = [_with_velocity(route, bucket, transport.ops) for bucket in buckets]
    correction = Correction(route.plan.config, transport.ops)
    of = {b.plan.ordinal: [arrays[t.spec.name] for t in b.plan.tensors] for b in buckets}
    for bucket in buckets:
        name = f"{route.name}.{bucket.plan.ordinal}"
        bucket.send(of[bucket.plan.ordinal], name, correction)
    for _ in range(transport.exchange.turns):
        for bucket in buckets:
            bucket.way.advance()
    flags = []
    for bucket in buckets:
        bucket.way.wait()
        flags.append(bucket.way.receive(of[bucket.plan.ordinal]))
    flagged: Any = tf.concat(flags, 0)
    kept = [*besides, *_left(route, buckets, transport.ops)]
    _commit_unless(tf.reduce_any(flagged), kept)
    return [arrays[spec.name].value for spec in route.specs], flagged


def clipped(gradients: Sequence[Array], threshold: Any) -> list[Array]:
    """Gradients of a norm that is no larger; what is not finite stays so, and is flagged."""
    squares = [tf.reduce_sum(tf.square(tf.cast(g.value, tf.float64))) for g in gradients]
    factor = tf.minimum(threshold / tf.sqrt(tf.add_n(squares)), 1.0)
    return [Buffer(g.value * tf.cast(factor, g.value.dtype)) for g in gradients]


def norm_of(gradients: Sequence[Any]) -> Any:
    """Euclidean norm of all of them."""
    return tf.sqrt(2 * tf.add_n([tf.nn.l2_loss(tf.cast(g, tf.float32)) for g in gradients]))


class Gathered(Direct[Array]):
    """One allgather between as many ranks as the run has: an elastic trace outlives its size."""

    def receive(self, targets: Sequence[Array], gain: float = 1.0) -> Sequence[bool]:
        """`Route.receive`."""
        if self._gathered.numel is not None:
            return super().receive(targets, gain)
        scale: Any = gain
        if self._bucket.reduction == "average":
            size = self._bucket.layout.payload_bytes
            scale = gain * (1 / (tf.size(self._gathered.value) // size))
        return self._codec.decode(self._bucket, self._gathered, scale, targets)


def _bucket(route: Route, plan: BucketPlan, transport: Transport) -> Bucket:
    if isinstance(transport.exchange, ShardedExchange):
        return _sharded(route, plan, transport, transport.exchange)
    if isinstance(transport.exchange, HierarchicalExchange):
        return _hierarchical(route, plan, transport, transport.exchange)
    ops, codec, collective = transport.ops, transport.codec, transport.collective
    arenas = _arenas(plan, [route.residuals[t.spec.name] for t in plan.tensors], ops)
    return Bucket(plan, Gathered(plan, arenas, ops, codec, collective), [arenas], None)


def _sharded(
    route: Route, plan: BucketPlan, transport: Transport, exchange: ShardedExchange[Array]
) -> Bucket:
    ops, codec, collective = transport.ops, transport.codec, transport.collective
    dealt = exchange.dealt(plan)
    starts = dict.fromkeys(route.residuals, 0)
    shards = []
    for scatter in dealt.scatter:
        pieces = []
        for tensor in scatter.tensors:
            name = tensor.spec.name
            pieces.append(route.residuals[name][starts[name] : starts[name] + tensor.numel])
            starts[name] += tensor.numel
        shards.append(_arenas(scatter, pieces, ops))
    owned = _owned(route, dealt.gather[collective.rank], ops)
    return Bucket(plan, Sharded(dealt, shards, owned, ops, codec, collective), shards, owned)


def _hierarchical(
    route: Route, plan: BucketPlan, transport: Transport, exchange: HierarchicalExchange[Array]
) -> Bucket:
    ops, codec = transport.ops, transport.codec
    mine = exchange.mine(plan)
    owned = _owned(route, mine[0], ops) if mine else None
    way = Hierarchical(exchange.dealt(plan), owned, ops, codec, exchange.team)
    return Bucket(plan, way, [], owned)


def _owned(route: Route, plan: BucketPlan, ops: TensorFlowOps) -> Arenas[Array]:
    return _arenas(plan, [route.owned[t.spec.name] for t in plan.tensors], ops)


def _with_velocity(route: Route, bucket: Bucket, ops: TensorFlowOps) -> Bucket:
    names = [tensor.spec.name for tensor in bucket.plan.tensors]
    velocity = _arenas(bucket.plan, [route.velocities[name] for name in names], ops)
    return replace(bucket, velocity=velocity)


def _arenas(plan: BucketPlan, pieces: Sequence[Any], ops: TensorFlowOps) -> Arenas[Array]:
    """Arenas with these tensors' residuals, and with zeros where it leaves gaps between them."""
    parts, stop = [], 0
    for tensor, piece in zip(plan.tensors, pieces, strict=True):
        if tensor.start > stop:
            parts.append(tf.zeros([tensor.start - stop], piece.dtype))
        parts.append(piece)
        stop = tensor.stop
    return Arenas(plan, Buffer.joined(parts), ops.zeros(plan.numel, plan.residual_dtype))


def _left(route: Route, buckets: Sequence[Bucket], ops: TensorFlowOps) -> Iterator[tuple[Any, Any]]:
    """Residual variables, and what was not sent; velocities likewise."""

    def left(arenas: Arenas[Array], tensor: TensorPlan) -> Any:
        return ops.view(arenas.candidate, tensor.start, tensor.stop).value

    for bucket in buckets:
        for position, tensor in enumerate(bucket.plan.tensors):
            parts = [left(arenas, arenas.plan.tensors[position]) for arenas in bucket.arenas]
            if parts:
                whole = parts[0] if len(parts) == 1 else tf.concat(parts, 0)
                yield route.residuals[tensor.spec.name], whole
            if bucket.owned is not None:
                own = left(bucket.owned, bucket.owned.plan.tensors[position])
                yield route.owned[tensor.spec.name], own
            if bucket.velocity is not None:
                yield route.velocities[tensor.spec.name], left(bucket.velocity, tensor)


def _commit_unless(flagged: Any, kept: Sequence[tuple[Any, Any]]) -> None:
    """Assign to variables what they become."""

    def commit() -> None:
        for variable, tensor in kept:
            variable.assign(tensor)

    tf.cond(flagged, lambda: None, commit)
