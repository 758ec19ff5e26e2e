"""Learning-rate rescaling in graphs; `horovod_topk.core.rates` has the mathematics.

Each residual has a variable of two rates, [2] float64: the one in whose units the residual is, and
the largest so far; 0 while there is none. A step that commits assigns them, like the residual;
a step that is skipped leaves them unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from horovod_topk.core.rates import LARGEST, RATES, is_unit
from horovod_topk.errors import ConfigError


def rate_of(optimizer: Any) -> Any:
    """The learning rate of the next step of a Keras 3 or tf-keras optimizer: [] float64.

    A schedule gives the rate of the present iteration; in a graph it is read when the graph runs.

    Raises:
        ConfigError: the optimizer has no learning rate.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    rate = getattr(optimizer, "learning_rate", None)
    if hasattr(optimizer, "_decayed_lr"):  # legacy optimizers of tf-keras
        rate = optimizer._decayed_lr(tf.float32)
    elif hasattr(optimizer, "_current_learning_rate"):  # tf-keras: that is the last step's rate
        rate = optimizer._learning_rate(optimizer.iterations)
    if rate is None:
        raise ConfigError(
            f"follow_lr=True was given, and {type(optimizer).__name__} has no learning_rate",
            cure="Leave follow_lr= out",
        )
    return tf.cast(tf.convert_to_tensor(rate), tf.float64)


class VariableRates:
    """Learning rates in variables, for learning-rate rescaling in graphs.

    Args:
        fall: returns `fall_of` a tensor, by its name.

    Attributes:
        variables: the pair of rates of each tensor, by name.
    """

    def __init__(self, fall: Callable[[str], float]) -> None:
        self.variables: dict[str, Any] = {}
        self._fall = fall

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
        """The factor, [] float64, that rescales a residual to a new learning rate."""
        before, (now, _) = self.variables[name][0], self._following(name, rate)
        return tf.where(before > 0, before / now, 1.0)

    def decay(self, name: str, rate: Any) -> Any:
        """Return the rate in whose units a residual is at `rate`, divided by the largest so far.

        It is [] float64, and 1 where no rate is known.
        """
        now, largest = self._following(name, rate)
        return tf.where(largest > 0, now / largest, 1.0)

    def decay_now(self, name: str) -> Any:
        """Return `decay` after the last committed step."""
        now, largest = tf.unstack(self.variables[name], num=2)
        return tf.where(largest > 0, now / largest, 1.0)

    def take_on(self, names: tuple[str, ...], rate: Any) -> None:
        """Note in a graph that residuals are in the units of a new learning rate now."""
        for name in names:
            self.variables[name].assign(tf.stack(self._following(name, rate)))

    def _following(self, name: str, rate: Any) -> tuple[Any, Any]:
        """Return the unit and the largest rate of a tensor once a step at `rate` is committed."""
        before, largest = tf.unstack(self.variables[name], num=2)
        unit = tf.maximum(rate, self._fall(name) * before)
        is_known = (rate > 0.0) & is_unit(unit)
        largest = tf.where(is_known, tf.maximum(rate, largest), largest)
        return tf.where(is_known, unit, before), largest
