"""A rank's gradients before and beside their exchange: sparse ones, clipping, momentum.

Gradients are clipped by their norm over all tensors of a rank. In a single process nothing is
compressed, and clipping and momentum correction are done here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod_topk.core.codec.clipping import LocalClip
from horovod_topk.core.codec.momentum import correct
from horovod_topk.core.codec.momentum import velocities as velocities_of
from horovod_topk.core.plan.buckets import lay_out
from horovod_topk.methods.dense import Dense
from horovod_topk.methods.protocol import Method, Piece
from horovod_topk.ops.tensorflow import Array, Buffer, TensorFlowOps
from horovod_topk.tensorflow.planning import spec_of, unwrap
from horovod_topk.tensorflow.variables import StateVariables


def is_dense(gradient: Any) -> bool:
    """Whether a gradient is compressed: it is neither None nor tf.IndexedSlices."""
    return tf.is_tensor(gradient) and not isinstance(gradient, tf.IndexedSlices)


def is_sparse(gradient: Any) -> bool:
    """Whether a gradient is sparse, as those of `tf.gather` and `Embedding` layers are."""
    return isinstance(gradient, tf.IndexedSlices)


def to_dense(gradient: Any) -> Any:
    """Convert a sparse gradient to a tensor; others are returned unchanged."""
    return tf.convert_to_tensor(gradient) if is_sparse(gradient) else gradient


def summed(gradient: Any) -> Any:
    """Add up a sparse gradient's slices of the same row; others are returned unchanged.

    A gradient is the sum of its slices. Optimizers of Keras 3 square each slice by itself.
    """
    if not is_sparse(gradient):
        return gradient
    rows, places = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(rows))
    return tf.IndexedSlices(values, rows, gradient.dense_shape)


def clip(gradients: Sequence[Array], clip_norm: float, reduction: str, ranks: int) -> None:
    """Clip all gradients of a rank; gradients that are not finite stay so, and are flagged."""
    local = LocalClip(clip_norm, reduction, _Norms(), by_bucket=False)
    local.begin(ranks)
    local.clip(gradients)


class _Norms:
    """`core.codec.clipping.GradientNorms` in graphs."""

    def device(self, gradients: Sequence[Array]) -> object:
        """`GradientNorms.device`."""
        return None

    def norm(self, gradients: Sequence[Array], before: Any) -> Any:
        """`GradientNorms.norm`."""
        squares = [tf.reduce_sum(tf.square(tf.cast(g.value, tf.float64))) for g in gradients]
        return tf.sqrt(tf.add_n(squares) + before**2)

    def reduce(self, gradients: Sequence[Array], threshold: float, norm: Any) -> None:
        """`GradientNorms.reduce`."""
        factor, ops = tf.minimum(threshold / norm, 1.0), TensorFlowOps()
        for gradient in gradients:
            ops.write_scaled(gradient, factor, gradient, False)


def clipped_alone(gradients: Sequence[Any], limit: float) -> list[Any]:
    """Clip gradients to a norm of `limit`; sparse gradients and None are returned unchanged."""
    arrays = {i: Buffer(g) for i, g in enumerate(gradients) if is_dense(g)}
    if arrays:
        clip(list(arrays.values()), limit, "sum", ranks=1)
    return [arrays[i].value if i in arrays else g for i, g in enumerate(gradients)]


def with_momentum(
    gradients: Sequence[Any],
    variables: Sequence[Any],
    names: Sequence[str],
    config: Method,
    velocities: StateVariables,
) -> list[Any]:
    """Apply momentum correction where nothing is compressed: the updates are SGD's with momentum.

    With Adam and beta_1=0, the result is that of many ranks: the mean square is of velocities. For
    the updates of Adam with its own momentum, pass momentum="auto".

    Velocities do not change in a step with a NaN or an infinity. Sparse gradients and None are
    returned unchanged, as where gradients are exchanged.
    """
    result, ops = list(gradients), TensorFlowOps()
    moved: list[tuple[Any, Array]] = []
    for i, (name, gradient, variable) in enumerate(zip(names, gradients, variables, strict=True)):
        if is_dense(gradient):
            inner = unwrap(variable)
            spec = spec_of(name, gradient, inner)
            whole = lay_out(0, [Piece(spec, spec.numel, 0)], "direct", Dense(), "sum")
            ((velocity,),) = velocities.of([inner], [whole])
            before: Array = Buffer(velocity.value())
            after: Array = Buffer(tf.zeros_like(before.value))
            flat: Array = Buffer(tf.cast(tf.reshape(gradient, [-1]), before.dtype))
            own = velocities_of(config, [before], [after])
            (sent,) = correct([flat], own, ops)
            moved.append((velocity, after))
            result[i] = tf.reshape(tf.cast(sent.value, gradient.dtype), tf.shape(gradient))
    finite = [tf.reduce_all(tf.math.is_finite(after.value)) for _, after in moved]

    def commit() -> None:
        for velocity, after in moved:
            velocity.assign(after.value)

    tf.cond(tf.reduce_all(finite), commit, lambda: None)
    return result
