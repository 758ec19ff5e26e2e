"""Learning-rate rescaling in graphs; `core.state.learning_rates` has the mathematics.

Each residual has two rates, a row of one variable: the rate in whose units the residual is, and the
largest so far; 0 while there is none. A step that commits assigns them, like the residual; a step
that is skipped leaves them unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from horovod_topk.core.state.learning_rates import LARGEST, RATES, next_units
from horovod_topk.tensorflow.variables import apart


def rate_of(optimizer: Any) -> Any:
    """The learning rate of the next step of a Keras 3 or tf-keras optimizer: [] float64.

    A schedule gives the rate of the present iteration; in a graph it is read when the graph runs.

    Returns:
        None: the optimizer is not known, or has no learning rate.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    rate = getattr(optimizer, "learning_rate", None)
    if hasattr(optimizer, "_decayed_lr"):  # legacy optimizers of tf-keras
        rate = optimizer._decayed_lr(tf.float32)
    elif hasattr(optimizer, "_current_learning_rate"):  # tf-keras: that is the last step's rate
        rate = optimizer._learning_rate(optimizer.iterations)
    if rate is None:
        return None
    return tf.cast(tf.convert_to_tensor(rate), tf.float64)


class VariableRates:
    """Learning rates in variables, for learning-rate rescaling in graphs.

    Args:
        fall: returns `fall_of` a tensor, by its name.
        names: names of all tensors.
    """

    def __init__(self, fall: Callable[[str], float], names: Sequence[str]) -> None:
        self._rows = {name: row for row, name in enumerate(names)}
        self._fall, self._pairs = fall, apart(_zeros, len(names))

    def saved(self) -> dict[str, dict[str, float]]:
        """`RateUnits.saved`."""
        pairs = dict(zip(self._rows, self._pairs.numpy().tolist(), strict=True))
        known = {name: pair for name, pair in pairs.items() if pair[0] > 0}
        return {
            key: {name: pair[i] for name, pair in known.items()}
            for i, key in enumerate((RATES, LARGEST))
        }

    def load(self, saved: Mapping[str, Mapping[str, float]]) -> None:
        """`RateUnits.load`."""
        units, largest = saved.get(RATES, {}), saved.get(LARGEST, {})
        found = [units.get(name, 0.0) for name in self._rows]
        each = zip(self._rows, found, strict=True)
        self._pairs.assign([[unit, largest.get(name, unit)] for name, unit in each])

    def at(self, names: Sequence[str], rate: Any) -> StepRates:
        """Return the `StepRates` of a step with these tensors and this rate, [] float64."""
        rows = {name: self._rows[name] for name in names}
        return StepRates(self._pairs, rows, list(map(self._fall, names)), rate)


def _zeros(count: int) -> Any:
    with tf.device("cpu"):
        return tf.Variable(tf.zeros([count, 2], tf.float64), trainable=False)


class StepRates:
    """Learning rates of one step in a graph, computed for all tensors at once.

    Args:
        pairs: the variable of all pairs of rates.
        rows: the row of each tensor, by name.
        falls: `fall_of` each tensor.
        rate: the learning rate of the step, [] float64.

    Attributes:
        rate: the learning rate of the step.
        largest_decay: the largest of `decays`, [] float64.
    """

    def __init__(
        self, pairs: Any, rows: Mapping[str, int], falls: Sequence[float], rate: Any
    ) -> None:
        self._variable, self._places = pairs, {name: i for i, name in enumerate(rows)}
        self.rate, self._rows = rate, [*rows.values()]
        before, largest = tf.unstack(tf.gather(pairs, self._rows), axis=1)
        fall = tf.constant(falls, tf.float64)
        *now, is_known = next_units(rate, before, largest, fall, tf.maximum)
        unit, largest = (
            tf.where(is_known, *each) for each in zip(now, (before, largest), strict=True)
        )
        self._pairs = tf.stack([unit, largest], 1)
        factors = tf.where(before > 0, tf.math.divide_no_nan(before, unit), 1.0)
        self._factors = tf.where(tf.equal(rate, 0.0), tf.zeros_like(factors), factors)
        self._decays = tf.where(largest > 0, tf.math.divide_no_nan(unit, largest), 1.0)
        self.largest_decay = tf.reduce_max(self._decays)

    def factors(self, names: Sequence[str], dtype: str, least: float = 0.0) -> Any:
        """Factors that rescale residuals to the learning rate: [n] of a dtype.

        They are 0 in a step at rate 0, which sends gradients alone.

        least: the smallest factor.
        """
        return tf.cast(tf.maximum(self._of(names, self._factors), least), dtype)

    def decays(self, names: Sequence[str]) -> Any:
        """Return the rates in whose units residuals are after the step, divided by their largest.

        They are float64, one for each name, and 1 where no rate is known.
        """
        return self._of(names, self._decays)

    def take_on(self) -> None:
        """Note in a graph that residuals are in the units of the learning rate now."""
        self._variable.scatter_nd_update([[row] for row in self._rows], self._pairs)

    def _of(self, names: Sequence[str], numbers: Any) -> Any:
        places = [self._places[name] for name in names]
        return tf.gather(numbers, tf.constant(places, tf.int32))
