"""Learning-rate rescaling in graphs; `core.state.learning_rates` has the mathematics.

Each residual has two rates, a row of a variable: the rate in whose units the residual is, and the
largest so far; 0 while there is none. A step that commits assigns them, like the residual; a step
that is skipped leaves them unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from horovod_topk.core.state.learning_rates import LARGEST, RATES, next_units
from horovod_topk.tensorflow.variables import Row


def rate_of(optimizer: Any) -> Any:
    """The learning rate of the next step of a Keras 3 or tf-keras optimizer: [] float64, or None.

    A schedule gives the rate of the present iteration; in a graph it is read when the graph runs.
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
        rows: the row of each tensor's two rates, by name.
    """

    def __init__(self, fall: Callable[[str], float], rows: Mapping[str, Row]) -> None:
        self._fall, self._rows = fall, rows

    def saved(self) -> dict[str, dict[str, float]]:
        """`RateUnits.saved`."""
        pairs = dict[str, list[float]]()
        for variable, rows in _by_variable(self._rows):
            pairs |= zip(rows, tf.gather(variable, [*rows.values()]).numpy().tolist(), strict=True)
        known = {name: pairs[name] for name in self._rows if pairs[name][0] > 0}
        return {
            key: {name: pair[i] for name, pair in known.items()}
            for i, key in enumerate((RATES, LARGEST))
        }

    def load(self, saved: Mapping[str, Mapping[str, float]]) -> None:
        """`RateUnits.load`."""
        units, largest = saved.get(RATES, {}), saved.get(LARGEST, {})
        for variable, rows in _by_variable(self._rows):
            found = [units.get(name, 0.0) for name in rows]
            pairs = [[unit, largest.get(n, unit)] for n, unit in zip(rows, found, strict=True)]
            _write(variable, rows, tf.constant(pairs, tf.float64))

    def at(self, names: Sequence[str], rate: Any) -> StepRates:
        """Return the `StepRates` of a step with these tensors and this rate, [] float64."""
        return StepRates({name: self._rows[name] for name in names}, self._fall, rate)


def _by_variable(rows: Mapping[str, Row]) -> list[tuple[Any, dict[str, int]]]:
    """Variables, and the row of each name in them."""
    found: dict[int, tuple[Any, dict[str, int]]] = {}
    for name, (variable, row) in rows.items():
        found.setdefault(id(variable), (variable, {}))[1][name] = row
    return [*found.values()]


def _write(variable: Any, rows: Mapping[str, int], pairs: Any) -> None:
    variable.scatter_nd_update([[row] for row in rows.values()], pairs)


class StepRates:
    """Learning rates of one step in a graph, computed for all tensors at once.

    Args:
        rows: the row of each tensor's rates, by name.
        fall: returns `fall_of` a tensor, by its name.

    Attributes:
        rate: the learning rate of the step, [] float64.
        largest_decay: the largest of `decays`, [] float64.
    """

    def __init__(self, rows: Mapping[str, Row], fall: Callable[[str], float], rate: Any) -> None:
        self._variables, self.rate = _by_variable(rows), rate
        names = [name for _, own in self._variables for name in own]
        self._places = {name: i for i, name in enumerate(names)}
        pairs = [tf.gather(variable, [*own.values()]) for variable, own in self._variables]
        before, largest = tf.unstack(tf.concat(pairs, 0), axis=1)
        falls = tf.constant([*map(fall, names)], tf.float64)
        *now, is_known = next_units(rate, before, largest, falls, tf.maximum)
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
        parts = tf.split(self._pairs, [len(rows) for _, rows in self._variables])
        for (variable, rows), pairs in zip(self._variables, parts, strict=True):
            _write(variable, rows, pairs)

    def _of(self, names: Sequence[str], numbers: Any) -> Any:
        places = [self._places[name] for name in names]
        return tf.gather(numbers, tf.constant(places, tf.int32))
