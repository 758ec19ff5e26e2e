"""One step of compression as a graph.

It is straight: encode every bucket, gather, decode, then commit the residuals unless a rank flagged
a tensor. All that differs from step to step runs with the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from horovod_topk.core.codec import Codec
from horovod_topk.core.exchange import Allgather
from horovod_topk.core.plan import BucketPlan, Plan, TensorSpec
from horovod_topk.core.residual import Arenas
from horovod_topk.ops.tensorflow import Array, Buffer, TensorFlowOps


@dataclass(frozen=True)
class Route:
    """How the gradients of one set of variables travel."""

    specs: tuple[TensorSpec, ...]  # in the order of the variables
    plan: Plan
    prefix: str
    ordinal: int
    residuals: Mapping[str, Any]  # tensor name -> tf.Variable

    @property
    def name(self) -> str:
        """The collectives' prefix, equal on all ranks."""
        return f"{self.prefix}.{self.ordinal}"


@dataclass(frozen=True)
class Sent:
    """A bucket under way, while the graph is built."""

    bucket: BucketPlan
    arenas: Arenas[Array]
    gradients: list[Array]
    gathered: Array


def step(
    route: Route,
    gradients: Sequence[Any],
    ops: TensorFlowOps,
    codec: Codec[Array],
    exchange: Allgather[Array],
) -> tuple[list[Any], Any]:
    """Exchange gradients, in the order of `route.specs`.

    Returns:
        The exchanged gradients, and one flag a tensor, bucket by bucket: True where a rank had a
        NaN or an infinity. Residuals have then stayed as they were, bit for bit.
    """
    arrays: dict[str, Array] = {
        spec.name: Buffer(tf.ensure_shape(gradient, spec.shape))
        for spec, gradient in zip(route.specs, gradients, strict=True)
    }
    sent = [_send(route, bucket, arrays, ops, codec, exchange) for bucket in route.plan.buckets]
    flags = tf.concat([_receive(route, each, codec, exchange) for each in sent], 0)
    _commit_unless(tf.reduce_any(flags), route, sent, ops)
    return [arrays[spec.name].value for spec in route.specs], flags


def norm_of(gradients: Sequence[Any]) -> Any:
    """Euclidean norm of all of them."""
    return tf.sqrt(2 * tf.add_n([tf.nn.l2_loss(tf.cast(g, tf.float32)) for g in gradients]))


def _send(
    route: Route,
    bucket: BucketPlan,
    arrays: Mapping[str, Array],
    ops: TensorFlowOps,
    codec: Codec[Array],
    exchange: Allgather[Array],
) -> Sent:
    residual = Buffer.joined([route.residuals[t.spec.name] for t in bucket.tensors])
    arenas = Arenas(bucket, residual, ops.zeros(bucket.numel, bucket.residual_dtype))
    payload = codec.new_payload(bucket)
    gradients = [arrays[t.spec.name] for t in bucket.tensors]
    codec.encode(arenas, gradients, payload)
    pending = exchange.launch(payload, f"{route.name}.{bucket.ordinal}")
    return Sent(bucket, arenas, gradients, pending.wait())


def _receive(route: Route, sent: Sent, codec: Codec[Array], exchange: Allgather[Array]) -> Any:
    """Decode a bucket into its gradients; returns which of its tensors are flagged."""
    scale: Any = 1.0
    if route.plan.reduction == "average":
        ranks: Any = exchange.ranks
        if sent.gathered.numel is None:  # elastic: the run knows
            ranks = tf.size(sent.gathered.value) // sent.bucket.layout.payload_bytes
        scale = 1 / ranks
    return codec.decode(sent.bucket, sent.gathered, scale, sent.gradients)


def _commit_unless(flagged: Any, route: Route, sent: Sequence[Sent], ops: TensorFlowOps) -> None:
    """What was not sent becomes the residual."""
    left = {
        tensor.spec.name: ops.view(each.arenas.candidate, tensor.start, tensor.stop).value
        for each in sent
        for tensor in each.bucket.tensors
    }

    def commit() -> None:
        for name, tensor in left.items():
            route.residuals[name].assign(tensor)

    tf.cond(flagged, lambda: None, commit)
