"""Gradients that go past all that is done to ours: sparse ones, and those of local variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod_topk.errors import ConfigError
from horovod_topk.methods.protocol import Method
from horovod_topk.tensorflow.planning import names_of


def to_dense(gradient: Any) -> Any:
    """A sparse gradient as a tensor; others as they are."""
    return tf.convert_to_tensor(gradient) if is_sparse(gradient) else gradient


def is_sparse(gradient: Any) -> bool:
    """Whether it is what `tf.gather` and layers like `Embedding` give their variable."""
    return isinstance(gradient, tf.IndexedSlices)


def refuse_local(optimizer: Any, config: Method) -> None:
    """Have `register_local_var` of an optimizer refuse what would lose momentum or clipping.

    Args:
        optimizer: a distributed one of tf-keras, whose local variables are not exchanged.
        config: as `check_none_left_out` takes it.

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
    """Refuse a sparse gradient where it would go without momentum, or unclipped.

    Args:
        gradients: one a variable.
        variables: in the same order.
        config: with the momentum that is corrected, and that the optimizer does not apply then.

    Raises:
        ConfigError: one is sparse, and there is a momentum or a `clip_norm`; nothing has changed.
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
    """What does not happen to a gradient that is not among ours, in words; "" for nothing."""
    lost = []
    if config.momentum:
        lost.append(f"nobody would apply the momentum of {config.momentum}")
    if config.clip_norm is not None:
        lost.append(f"it would not be clipped to clip_norm={config.clip_norm}")
    return ", and ".join(lost)
