"""A trial of an optimizer on gradients that are mostly zeros, as sparse ones are."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from horovod_topk.errors import ConfigError
from horovod_topk.methods.protocol import Method, Rounds

log = logging.getLogger("horovod_topk")


def check_bears_zeros(make: Callable[[], Any], kind: str, config: Method) -> None:
    """Refuse an optimizer that does not survive two updates of a small matrix.

    The first gradient has one element that is not zero, the second has none. Dense gradients seldom
    have rows and columns of zeros, and sparse ones nearly always do.

    Args:
        make: makes a copy of the optimizer that exchanges nothing.
        kind: name of the optimizer's class.
        config: the compressor's settings.

    Raises:
        ConfigError: the matrix has a NaN or an infinity afterwards.
    """
    if isinstance(config, Rounds) or (config.ratio == 1.0 and not config.withheld()):
        return  # every element is sent
    with tf.init_scope():
        try:
            weights = _updated(make())
        except Exception as error:  # an optimizer that cannot update a matrix by itself
            log.info("TopKEF has not tried %s on sparse gradients: %s", kind, error)
            return
        is_sound = bool(tf.reduce_all(tf.math.is_finite(weights)))
    if not is_sound:
        raise ConfigError(
            f"{kind} makes weights NaN or infinite where rows and columns of a gradient are zero, "
            "as in sparse gradients: it divides by what is zero then",
            cure="Give it a larger epsilon, use another optimizer, or pass TopKEF(ratio=1.0) or "
            "Compression.none",
        )


def _updated(optimizer: Any) -> Any:
    """A matrix after an optimizer's updates."""
    weights = tf.Variable(tf.ones([4, 4]), name="trial")
    one = tf.scatter_nd([[1, 2]], [1.0], [4, 4])
    steps = getattr(optimizer, "gradient_accumulation_steps", None) or 1
    for gradient in [one] * steps + [tf.zeros_like(one)] * steps:
        optimizer.apply_gradients([(gradient, weights)])
    return weights.read_value()
