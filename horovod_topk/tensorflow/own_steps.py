"""Steps that Keras' other optimizers make themselves, corrected when they have ended.

The optimizer's own step sees the exchanged gradients. What it has changed is corrected by the
formulas of its family (`horovod_topk.updates.formulas.FAMILIES`).
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovod_topk.updates import formulas
from horovod_topk.updates.formulas import Family
from horovod_topk.updates.tensorflow import (
    VERBS,
    Codes,
    UpdateInputs,
    codes_around,
    rms_of,
    value_of,
)


class OwnStep:
    """One variable in the step that begins; nothing is corrected if it is not committed.

    Args:
        gradient: the exchanged gradient, of the variable's dtype.
        variable: the tf.Variable.
        known: what is known of its exchange.
        family: of the optimizer.
    """

    def __init__(self, gradient: Any, variable: Any, known: UpdateInputs, family: Family) -> None:
        self._gradient, self._variable, self._known = gradient, variable, known
        self._family, self._before = family, value_of(variable)
        (self._piece,) = known.codes
        self._kept = self._piece.value()
        self._codes, self._following = codes_around(self._kept, gradient, known.does)
        share = formulas.share(tf.cast(self._following, variable.dtype))
        self._share = tf.reshape(share, variable.shape)
        self._is_committed = tf.not_equal(known.does, Codes.STAY)
        self._sign: Any = 1.0  # c of a step that is a sign

    def compare(self, mean: Any, beta1: Any) -> None:
        """Compute the factor c of an optimizer that steps by the sign of its mean of gradients."""
        (square,), before = self._known.squares, value_of(mean)
        squares = tf.cast(tf.reshape(square.value(), mean.shape), mean.dtype)
        known = before, squares, self._share, tf.cast(beta1, mean.dtype)
        self._sign = formulas.own_sign(self._gradient, *known, VERBS)

    def move(self, mean: Any, began: Any) -> None:
        """Move the optimizer's mean of gradients, a tf.Variable, before the step."""
        before, began = value_of(mean), tf.cast(began, mean.dtype)
        after = formulas.own_mean(before, self._gradient, self._share, began)
        self._write(mean, after, before)

    def correct(self, rate: Any) -> None:
        """Correct what the step has changed, and note which elements have arrived.

        rate: the learning rate, [] float64; None: it is not known.
        """
        variable, (square,) = self._variable, self._known.squares
        now, damping = value_of(variable), tf.cast(self._known.damping[0], variable.dtype)
        often = tf.reshape(formulas.arrives_often(self._codes), variable.shape)
        by_class = tf.where(often, damping[0], damping[1])
        factor = self._sign if self._family.is_sign else by_class
        farthest = rms_of(self._before) * formulas.FARTHEST
        if rate is not None:
            farthest = tf.maximum(farthest, tf.cast(rate, variable.dtype))
        known = factor, self._share, farthest
        after = formulas.own_weight(self._before, now, *known, self._family, VERBS)
        self._write(variable, after, now)
        self._write(self._piece, self._following, self._kept)
        before = square.value()
        gradient = tf.cast(tf.reshape(self._gradient, [-1]), before.dtype)
        self._write(square, formulas.own_square(before, gradient), before)

    def _write(self, target: Any, after: Any, before: Any) -> None:
        """Assign `after` if the step is committed, else `before`."""
        target.assign(tf.where(self._is_committed, after, before))
