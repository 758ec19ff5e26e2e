"""Adafactor of Keras 3 on gradients with rows and columns of zeros."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class Floored:
    """Mixin for Adafactor whose mean square is never below the smallest normal number.

    Adafactor divides by the root of (row mean x column mean / mean) of g^2 + 1e-30. Where a row and
    a column have no gradient, that is 0 in float32, and 0 / 0 a NaN, which its clipping by the root
    mean square then writes to the whole matrix. PyTorch's Adafactor has a floor of its own.
    """

    def assign(self, variable: Any, value: Any) -> None:
        """As the base class, with a floor for mean squares."""
        this: Any = self
        base: Any = super()
        if any(variable is each for each in this._v):
            smallest = 2.0**-14 if variable.dtype == "float16" else 2.0**-126
            value = tf.maximum(value, smallest)
        base.assign(variable, value)
