"""Loss scaling: gradients come multiplied by a scaler's factor, residuals are kept without it.

`horovod_topk.torch_training.preprocessing` has the formulas. An overflow on any rank becomes a NaN
on every rank: all ranks skip the step, and no residual changes.

With Keras 3, the optimizer of `horovod_topk.tensorflow.keras` divides by the scale. With tf-keras,
the `LossScaleOptimizer` wraps the distributed optimizer, which finds a dynamic scale among its
checkpoint dependencies.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horovod_topk.errors import ConfigError, UnsupportedDtypeError, UnsupportedOperationError
from horovod_topk.tensorflow.gradients import is_dense

Scale = Callable[[], Any]  # the present scale: a number, a scalar tensor, or None without one


def check_scaler(scaler: Any) -> None:
    """Refuse an object that is not an optimizer with a loss scale."""
    wanted = ("initial_scale", "inner_optimizer")
    if scaler is None or all(hasattr(scaler, each) for each in wanted):
        return
    raise ConfigError(
        f"grad_scaler={scaler!r} is no LossScaleOptimizer",
        cure="Pass the LossScaleOptimizer, of Keras 3 or of tf-keras, that scaled the loss whose "
        "gradients a tape is asked for, or None",
    )


def scale_of(scaler: Any) -> Scale:
    """A function that returns the present scale of `grad_scaler=`, read as Keras reads it."""
    if scaler is None:
        return lambda: None
    if hasattr(scaler, "get_scaled_loss"):  # tf-keras
        return lambda: scaler.loss_scale
    return lambda: scaler.dynamic_scale if scaler.built else scaler.initial_scale


class ScaleAround:
    """The scale of the `LossScaleOptimizer` that wraps an optimizer of tf-keras, if one does.

    The user may wrap it, or `compile` under the policy "mixed_float16", or `around`.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)  # weak: the optimizer refers to this
        self.fixed: float | None = None  # the scale, if it is known to be constant

    def __call__(self) -> Any:
        """The present scale, or None without one."""
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
    """Wrap a distributed optimizer of tf-keras in a `LossScaleOptimizer` like `scaler`.

    The new one starts from `scaler`'s initial scale, as Horovod's copies start without slots.
    """
    config = {"dynamic": scaler.dynamic, "initial_scale": scaler.initial_scale}
    if not scaler.dynamic:
        scale.fixed = float(scaler.initial_scale)
        return type(scaler)(optimizer, **config)
    return type(scaler)(optimizer, **config, dynamic_growth_steps=scaler.dynamic_growth_steps)


def is_scaler(optimizer: Any) -> bool:
    """Whether an optimizer is a `LossScaleOptimizer` of tf-keras."""
    return hasattr(optimizer, "get_scaled_loss") and hasattr(optimizer, "inner_optimizer")


def divided(gradients: Sequence[Any], scale: Any, variables: Sequence[Any]) -> list[Any]:
    """Divide gradients by the loss scale; sparse gradients and None are returned unchanged."""
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
    """Multiply gradients by the loss scale again."""
    return [each if scale is None else _times(each, scale) for each in gradients]


def _times(gradient: Any, factor: Any) -> Any:
    return gradient * tf.cast(factor, gradient.dtype) if is_dense(gradient) else gradient
