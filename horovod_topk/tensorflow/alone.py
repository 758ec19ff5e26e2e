"""Clipping and momentum correction where nothing is compressed: in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod_topk.config import TopKConfig
from horovod_topk.ops.tensorflow import Buffer
from horovod_topk.tensorflow.graph import clipped
from horovod_topk.tensorflow.planning import spec_of, unwrap
from horovod_topk.tensorflow.residuals import Residuals
from horovod_topk.tensorflow.scaling import is_dense


def clipped_alone(gradients: Sequence[Any], limit: float) -> list[Any]:
    """Gradients of a norm of `limit` at most; sparse ones and None stay as they are."""
    result = list(gradients)
    dense = [i for i, g in enumerate(result) if is_dense(g)]
    arrays = clipped([Buffer(result[i]) for i in dense], limit) if dense else []
    for i, array in zip(dense, arrays, strict=True):
        result[i] = array.value
    return result


def alone(
    gradients: Sequence[Any],
    variables: Sequence[Any],
    names: Sequence[str],
    config: TopKConfig,
    velocities: Residuals,
) -> list[Any]:
    """Gradients with their momentum, where nothing is compressed: without sparsity it is SGD's.

    With Adam, whose beta_1 is 0 then, it is what many ranks do: the mean square is of velocities.
    To have Adam's own in one process, take its momentum over with "optimizer".

    Velocities stay as they are in a step with a NaN or an infinity. Sparse gradients and None do
    not take part, as where gradients are exchanged.
    """
    result = list(gradients)
    moved = []
    for i, (name, gradient, variable) in enumerate(zip(names, gradients, variables, strict=True)):
        if is_dense(gradient):
            inner = unwrap(variable)
            velocity = velocities.of(inner, spec_of(name, gradient, inner))
            following, result[i] = _moved(velocity, gradient, config)
            moved.append((velocity, following))
    finite = [tf.reduce_all(tf.math.is_finite(following)) for _, following in moved]

    def commit() -> None:
        for velocity, following in moved:
            velocity.assign(following)

    tf.cond(tf.reduce_all(finite), commit, lambda: None)
    return result


def _moved(velocity: Any, gradient: Any, config: TopKConfig) -> tuple[Any, Any]:
    """The next velocity m u + g, and what is applied: that, or with `nesterov` m (m u + g) + g."""
    flat = tf.cast(tf.reshape(gradient, [-1]), velocity.dtype)
    following = velocity * config.momentum + flat
    applied = following * config.momentum + flat if config.nesterov else following
    return following, tf.reshape(tf.cast(applied, gradient.dtype), tf.shape(gradient))
