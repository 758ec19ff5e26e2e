"""Residuals that follow the learning rate, in graphs; the rule is `horovod_topk.core.rates`'s.

A rate stands beside each residual, the one in whose units it is: [1] float64, 0 while there is
none. Both are assigned where a step is committed; a step that is skipped leaves them as they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import tensorflow as tf

from horovod_topk.core.rates import SMALLEST
from horovod_topk.errors import ConfigError
from horovod_topk.tensorflow.graph import Route


def rate_of(optimizer: Any) -> Any:
    """The rate of the step that an optimizer of Keras 3 or tf-keras takes next: [] float64.

    Of a schedule that of the present iteration; in a graph it is read as the graph runs.

    Raises:
        ConfigError: it has none.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    rate = getattr(optimizer, "learning_rate", None)
    if hasattr(optimizer, "_decayed_lr"):  # of tf-keras' legacy optimizers
        rate = optimizer._decayed_lr(tf.float32)
    elif hasattr(optimizer, "_current_learning_rate"):  # tf-keras' has that of the last step
        rate = optimizer._learning_rate(optimizer.iterations)
    if rate is None:
        raise ConfigError(
            f"follow_lr=True was given, and {type(optimizer).__name__} has no learning_rate",
            cure="Leave follow_lr= out",
        )
    return tf.cast(tf.convert_to_tensor(rate), tf.float64)


def rescaled(route: Route, rate: Any) -> Route:
    """The same updates owed at another rate.

    Args:
        route: with residuals that follow.
        rate: [] float64; None: nothing follows.
    """
    if rate is None:
        return route
    factors = {name: _factor(unit, rate) for name, unit in route.units.items()}

    def owed(residuals: Mapping[str, Any]) -> dict[str, Any]:
        return {name: e * tf.cast(factors[name], e.dtype) for name, e in residuals.items()}

    return replace(route, residuals=owed(route.residuals), owned=owed(route.owned))


def turned(route: Route, rate: Any) -> Iterator[tuple[Any, Any]]:
    """Variables with the units of residuals, and what they become if these are committed."""
    for unit in () if rate is None else route.units.values():
        yield unit, tf.where(_is_followed(rate), rate, unit)


def noted(units: Mapping[str, Any]) -> dict[str, float]:
    """Rates by tensor, of those that have one, as `horovod_topk.core.rates.RATES` has them."""
    rates = {name: float(unit[0]) for name, unit in units.items()}
    return {name: rate for name, rate in rates.items() if rate > 0}


def _factor(unit: Any, rate: Any) -> Any:
    return tf.where((unit > 0) & _is_followed(rate), unit / rate, 1.0)


def _is_followed(rate: Any) -> Any:
    return (rate >= SMALLEST) & tf.math.is_finite(rate)
