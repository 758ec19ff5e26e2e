"""Learning-rate rescaling in graphs; the rule is `horovod_topk.core.rates`'s.

A rate stands beside each residual, the one in whose units it is: [1] float64, 0 while there is
none. Both are assigned where a step is committed; a step that is skipped leaves them as they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from horovod_topk.core.rates import is_followed
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
    """`horovod_topk.core.rates.Units` in variables.

    Attributes:
        variables: by tensor name.
    """

    def __init__(self) -> None:
        self.variables: dict[str, Any] = {}

    @property
    def units(self) -> dict[str, float]:
        """The rates in whose units residuals are, of tensors that have had one."""
        rates = {name: float(unit[0]) for name, unit in self.variables.items()}
        return {name: rate for name, rate in rates.items() if rate > 0}

    @units.setter
    def units(self, rates: Mapping[str, float]) -> None:
        for name, unit in self.variables.items():
            unit.assign([rates.get(name, 0.0)])

    def factor(self, name: str, rate: Any) -> Any:
        """What a residual is multiplied by at a rate, [] float64, so that its updates stay."""
        unit = self.variables[name]
        return tf.where((unit > 0) & is_followed(rate), unit / rate, 1.0)

    def take_on(self, names: tuple[str, ...], rate: Any) -> None:
        """Note that residuals are in units of a rate now, in a graph."""
        for unit in (self.variables[name] for name in names):
            unit.assign(tf.where(is_followed(rate), rate, unit))
