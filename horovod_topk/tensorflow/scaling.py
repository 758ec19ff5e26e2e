"""Loss scaling: gradients arrive in a scaler's units, residuals are kept in none.

Under a `LossScaleOptimizer` every gradient is S times what it stands for, and S changes. So that a
change of S changes nothing that is owed (Micikevicius et al. 2018, Mixed Precision Training, for S)

    compensate   a = e + g / S
    decode       g' = S * scale * sum over ranks of decode(p_r)

and Keras divides g' by S, as it does without compression. Both are exact to the bit where S is a
power of two, as Keras has it. An overflow on any rank is a NaN on every rank: all of them skip, and
no residual changes.

Keras 3's optimizer takes the scale out by itself, in `horovod_topk.tensorflow.keras`. tf-keras' is
around the distributed one, and tells it of a scale that changes as it tells checkpoints: as a
dependency.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horovod_topk.errors import ConfigError, UnsupportedDtypeError, UnsupportedOperationError

Scale = Callable[[], Any]  # the present scale: a number, a scalar tensor, or None without one


def check_scaler(scaler: Any) -> None:
    """Refuse what is no optimizer with a loss scale.

    Raises:
        ConfigError: neither Keras 3's nor tf-keras' `LossScaleOptimizer`.
    """
    wanted = ("initial_scale", "inner_optimizer")
    if scaler is None or all(hasattr(scaler, each) for each in wanted):
        return
    raise ConfigError(
        f"grad_scaler={scaler!r} is no LossScaleOptimizer",
        cure="Pass the LossScaleOptimizer, of Keras 3 or of tf-keras, that scaled the loss whose "
        "gradients a tape is asked for, or None",
    )


def scale_of(scaler: Any) -> Scale:
    """That of `grad_scaler=`, read as Keras itself reads it where it scales the loss."""
    if scaler is None:
        return lambda: None
    if hasattr(scaler, "get_scaled_loss"):  # tf-keras
        return lambda: scaler.loss_scale
    return lambda: scaler.dynamic_scale if scaler.built else scaler.initial_scale


class ScaleAround:
    """The scale of the `LossScaleOptimizer` that is, or will be, around an optimizer of tf-keras.

    Whoever puts it there: the user, `compile` under the policy "mixed_float16", or `within`.

    Args:
        optimizer: a distributed one.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)  # which holds the exchange, and so this
        self.fixed: float | None = None  # the scale, if it is known to stay as it is

    def __call__(self) -> Any:
        """The present scale, None without one.

        Raises:
            UnsupportedOperationError: it cannot be known, or differs among the gradients' passes.
        """
        optimizer: Any = self._optimizer()
        if not getattr(optimizer, "_is_wrapped_by_loss_scale_optimizer", False):
            return None
        if optimizer._agg_helper is not None:
            raise UnsupportedOperationError(
                "backward_passes_per_step under a LossScaleOptimizer adds up gradients of "
                "different scales",
                cure="Leave out one of the two, or use mixed_bfloat16, which needs no loss scale",
            )
        state = optimizer._lookup_dependency("loss_scale")
        if state is None and self.fixed is None:
            raise UnsupportedOperationError(
                "a LossScaleOptimizer(dynamic=False) was put around a distributed optimizer, which "
                "cannot know its scale",
                cure="Pass hvd.DistributedOptimizer(LossScaleOptimizer(optimizer, ...), ...)",
            )
        return self.fixed if state is None else tf.convert_to_tensor(state.current_loss_scale)


def around(scaler: Any, optimizer: Any, scale: ScaleAround) -> Any:
    """A `LossScaleOptimizer` of tf-keras like `scaler`, around a distributed optimizer.

    It starts from `scaler`'s initial scale, as Horovod's copies of optimizers start without slots.
    """
    config = {"dynamic": scaler.dynamic, "initial_scale": scaler.initial_scale}
    if not scaler.dynamic:
        scale.fixed = float(scaler.initial_scale)
        return type(scaler)(optimizer, **config)
    return type(scaler)(optimizer, **config, dynamic_growth_steps=scaler.dynamic_growth_steps)


def is_scaler(optimizer: Any) -> bool:
    """Whether it is a `LossScaleOptimizer` of tf-keras."""
    return hasattr(optimizer, "get_scaled_loss") and hasattr(optimizer, "inner_optimizer")


def divided(gradients: Sequence[Any], scale: Any, variables: Sequence[Any]) -> list[Any]:
    """Gradients out of the scaler's units; sparse ones and None stay as they are.

    Raises:
        UnsupportedDtypeError: one is float16, where what is unscaled may underflow.
    """
    if scale is None:
        return list(gradients)
    for gradient, variable in zip(gradients, variables, strict=True):
        if is_dense(gradient) and gradient.dtype == tf.float16:
            raise UnsupportedDtypeError(
                "float16 gradients cannot be taken out of a loss scale's units",
                tensor=variable.name,
                cure='Keep variables in float32, as the policy "mixed_float16" does',
            )
    return [_times(gradient, 1.0 / scale) for gradient in gradients]


def multiplied(gradients: Sequence[Any], scale: Any) -> list[Any]:
    """Gradients in the scaler's units again."""
    return [each if scale is None else _times(each, scale) for each in gradients]


def _times(gradient: Any, factor: Any) -> Any:
    return gradient * tf.cast(factor, gradient.dtype) if is_dense(gradient) else gradient


def is_dense(gradient: Any) -> bool:
    """Whether it is a gradient that is compressed: neither None nor tf.IndexedSlices."""
    return tf.is_tensor(gradient) and not isinstance(gradient, tf.IndexedSlices)
