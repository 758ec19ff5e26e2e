"""Momentum correction beside Keras' optimizers: never applied twice, and never not at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod_topk.config import TopKConfig
from horovod_topk.errors import ConfigError
from horovod_topk.tensorflow.planning import spec_of, unwrap
from horovod_topk.tensorflow.residuals import Residuals


def check_not_twice(optimizer: Any, momentum: float) -> None:
    """Refuse an optimizer that would apply a momentum of its own to corrected gradients.

    Args:
        optimizer: of Keras 3 or tf-keras, within a loss scale or not.
        momentum: of the correction; 0: off.

    Raises:
        ConfigError: it has one, or is not one whose momentum can be corrected.
    """
    if not momentum:
        return
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    own = getattr(optimizer, "momentum", None)
    if own is None:
        raise ConfigError(
            f"momentum={momentum} was given, and {type(optimizer).__name__} has no setting "
            "'momentum' that it could stand for",
            cure="Use momentum correction with SGD, or leave momentum= out",
        )
    if callable(own) or float(own):
        raise ConfigError(
            f"momentum={momentum} was given, and the optimizer has momentum={own}: it would be "
            "applied twice",
            cure="Pass momentum=0.0 to the optimizer, or to TopKEF",
        )


def alone(
    gradients: Sequence[Any],
    variables: Sequence[Any],
    names: Sequence[str],
    config: TopKConfig,
    velocities: Residuals,
) -> list[Any]:
    """Gradients with their momentum, where nothing is compressed: without sparsity it is SGD's.

    Velocities stay as they are in a step with a NaN or an infinity. Sparse gradients and None do
    not take part, as where gradients are exchanged.
    """
    result = list(gradients)
    moved = []
    for i, (name, gradient, variable) in enumerate(zip(names, gradients, variables, strict=True)):
        if tf.is_tensor(gradient) and not isinstance(gradient, tf.IndexedSlices):
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
