"""Learning-rate rescaling in graphs; the rule is `horovod_topk.core.rates`'s.

Two rates stand beside each residual, [2] float64: the one in whose units it is, and the largest so
far; 0 while there is none. They are assigned where a step is committed, as the residual is; a step
that is skipped leaves them as they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from horovod_topk.core.rates import LARGEST, RATES, is_followed
from horovod_topk.errors import ConfigError


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


class VariableRates:
    """Keeps followed learning rates in variables, as `horovod_topk.core.rates.Followed`.

    Attributes:
        variables: by tensor name.
    """

    def __init__(self) -> None:
        self.variables: dict[str, Any] = {}

    def saved(self) -> dict[str, dict[str, float]]:
        """`Followed.saved`."""
        pairs = {name: pair.numpy().tolist() for name, pair in self.variables.items()}
        known = {name: pair for name, pair in pairs.items() if pair[0] > 0}
        return {
            key: {name: pair[i] for name, pair in known.items()}
            for i, key in enumerate((RATES, LARGEST))
        }

    def load(self, saved: Mapping[str, Mapping[str, float]]) -> None:
        """`Followed.load`."""
        units, largest = saved.get(RATES, {}), saved.get(LARGEST, {})
        for name, pair in self.variables.items():
            unit = units.get(name, 0.0)
            pair.assign([unit, largest.get(name, unit)])

    def factor(self, name: str, rate: Any) -> Any:
        """What a residual is multiplied by at a rate, [] float64, so that its updates stay."""
        unit = self.variables[name][0]
        return tf.where((unit > 0) & is_followed(rate), unit / rate, 1.0)

    def decay(self, name: str, rate: Any) -> Any:
        """A rate, or the last that was followed, as a share of the largest, [] float64."""
        now, largest = self._following(name, rate)
        return tf.where(largest > 0, now / largest, 1.0)

    def take_on(self, names: tuple[str, ...], rate: Any) -> None:
        """Note that residuals are in units of a rate now, in a graph."""
        for name in names:
            self.variables[name].assign(tf.stack(self._following(name, rate)))

    def _following(self, name: str, rate: Any) -> tuple[Any, Any]:
        """The two rates of a tensor once a step at a rate is committed."""
        unit, largest = tf.unstack(self.variables[name], num=2)
        now = tf.where(is_followed(rate), rate, unit)
        return now, tf.maximum(largest, now)
