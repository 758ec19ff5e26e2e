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
from horovod_topk.core.codec import PayloadCodec
from horovod_topk.core.exchange import Exchange
from horovod_topk.core.momentum import Correction
from horovod_topk.core.plan import BucketPlan, Plan, TensorPlan, TensorSpec
from horovod_topk.core.residual import Arenas
from horovod_topk.core.route import Collective
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
    codec: PayloadCodec[Array]
    collective: Collective[Array]
    exchange: Exchange[Array]


@dataclass(frozen=True)
class Bucket:
    """A bucket, while the graph is built: its way, and the arenas of its residuals."""

    plan: BucketPlan
    way: Way[Array]
    arenas: Sequence[Arenas[Array]]  # one, or one for each shard, or none: owners keep all
    owned: Sequence[Arenas[Array]]  # one, or none
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


def _bucket(route: Route, plan: BucketPlan, transport: Transport) -> Bucket:
    """A bucket over what variables hold: residuals lie in them shard after shard."""
    ops, exchange = transport.ops, transport.exchange
    starts, residuals = dict.fromkeys(route.residuals, 0), []
    for holder in exchange.holders(plan):
        pieces = []
        for tensor in holder.tensors:
            name, start = tensor.spec.name, starts[tensor.spec.name]
            starts[name] = start + tensor.numel
            whole = route.residuals[name]
            pieces.append(whole if tensor.numel == whole.shape[0] else whole[start : starts[name]])
        residuals.append(_arenas(holder, pieces, ops))
    owned = [
        _arenas(own, [route.owned[t.spec.name] for t in own.tensors], ops)
        for own in exchange.owned(plan)
    ]
    way = exchange.route(plan, residuals, owned, {}, ops, transport.codec)
    return Bucket(plan, way, residuals, owned)


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
            for owned in bucket.owned:
                own = left(owned, owned.plan.tensors[position])
                yield route.owned[tensor.spec.name], own
            if bucket.velocity is not None:
                yield route.velocities[tensor.spec.name], left(bucket.velocity, tensor)


def _commit_unless(flagged: Any, kept: Sequence[tuple[Any, Any]]) -> None:
    """Assign to variables what they become."""

    def commit() -> None:
        for variable, tensor in kept:
            variable.assign(tensor)

    tf.cond(flagged, lambda: None, commit)
