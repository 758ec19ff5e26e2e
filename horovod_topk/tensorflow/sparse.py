"""Gradients without momentum correction and clipping: sparse ones, those of local variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod_topk.errors import ConfigError
from horovod_topk.methods.protocol import Method
from horovod_topk.tensorflow.planning import names_of


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


def is_sparse(gradient: Any) -> bool:
    """Whether a gradient is sparse, as those of `tf.gather` and `Embedding` layers are."""
    return isinstance(gradient, tf.IndexedSlices)


def refuse_local(optimizer: Any, config: Method) -> None:
    """Have `register_local_var` of an optimizer refuse to drop momentum or clipping.

    Args:
        optimizer: a distributed optimizer of tf-keras; it does not exchange its local variables.
        config: settings as for `check_none_left_out`.

    Raises:
        ConfigError: when a variable is registered; nothing has changed.
    """
    lost = _lost(config)
    if not lost:
        return

    def register_local_var(var: Any) -> None:
        raise ConfigError(
            "register_local_var() was called: its gradient is not exchanged, and so " + lost,
            tensor=names_of([var])[0],
            cure="Give local variables an optimizer of their own, or leave momentum= and "
            "clip_norm= of TopKEF out",
        )

    optimizer.register_local_var = register_local_var


def check_none_left_out(gradients: Sequence[Any], variables: Sequence[Any], config: Method) -> None:
    """Refuse a sparse gradient that would get no momentum or no clipping.

    Args:
        gradients: one for each variable.
        variables: the variables, in the same order.
        config: settings with the corrected momentum, which the optimizer does not apply itself.

    Raises:
        ConfigError: a gradient is sparse, and there is a momentum or a `clip_norm`; nothing has
            changed.
    """
    lost = _lost(config)
    sparse = [i for i, gradient in enumerate(gradients) if is_sparse(gradient)]
    if lost and sparse:
        raise ConfigError(
            "its gradient is sparse (tf.IndexedSlices) and takes Horovod's own way, on which "
            + lost,
            tensor=names_of(variables)[sparse[0]],
            cure="Pass sparse_as_dense=True to the DistributedOptimizer or "
            "DistributedGradientTape, or leave momentum= and clip_norm= of TopKEF out",
        )


def _lost(config: Method) -> str:
    """Describe which settings have no effect on uncompressed gradients; "" if none."""
    lost = []
    if config.momentum:
        lost.append(f"nobody would apply the momentum of {config.momentum}")
    if config.clip_norm is not None:
        lost.append(f"it would not be clipped to clip_norm={config.clip_norm}")
    return ", and ".join(lost)
