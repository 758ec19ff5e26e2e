"""Sparse gradients: they take Horovod's own way, past all that is done to dense ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod_topk.config import TopKConfig
from horovod_topk.errors import ConfigError
from horovod_topk.tensorflow.planning import names_of


def to_dense(gradient: Any) -> Any:
    """A sparse gradient as a tensor; others as they are."""
    return tf.convert_to_tensor(gradient) if is_sparse(gradient) else gradient


def is_sparse(gradient: Any) -> bool:
    """Whether it is what `tf.gather` and layers like `Embedding` give their variable."""
    return isinstance(gradient, tf.IndexedSlices)


def check_none_left_out(
    gradients: Sequence[Any], variables: Sequence[Any], config: TopKConfig
) -> None:
    """Refuse a sparse gradient where it would go without momentum, or unclipped.

    Args:
        gradients: one a variable.
        variables: in the same order.
        config: with the momentum that is corrected, and that the optimizer does not apply then.

    Raises:
        ConfigError: one is sparse, and there is a momentum or a `clip_norm`; nothing has changed.
    """
    lost = []
    if config.momentum:
        lost.append(f"nobody would apply the momentum of {config.momentum}")
    if config.clip_norm is not None:
        lost.append(f"it would not be clipped to clip_norm={config.clip_norm}")
    sparse = [i for i, gradient in enumerate(gradients) if is_sparse(gradient)]
    if lost and sparse:
        raise ConfigError(
            "its gradient is sparse (tf.IndexedSlices) and takes Horovod's own way, on which "
            + ", and ".join(lost),
            tensor=names_of(variables)[sparse[0]],
            cure="Pass sparse_as_dense=True to the DistributedOptimizer or "
            "DistributedGradientTape, or leave momentum= and clip_norm= of TopKEF out",
        )
