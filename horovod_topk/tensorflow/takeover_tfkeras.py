"""Momentum takeover of tf-keras optimizers: they apply no momentum, but are saved with it.

A saved model has the user's configuration: after loading, TopKEF takes the momentum over again, or
Keras applies it. The optimizer's momentum variables are zeros while momentum is corrected.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from horovod_topk.core.momentum_takeover import note_taken
from horovod_topk.tensorflow.arrivals import ByArrivals
from horovod_topk.tensorflow.takeover import (
    Taken,
    has_gathered,
    is_legacy,
    set_momentum,
    slots_of,
    update_by_stage,
)


def apply_none(optimizer: Any, taken: Taken) -> None:
    """Set a new optimizer's momentum to 0, but leave its configuration unchanged."""
    note_taken(type(optimizer).__name__, taken.value)
    set_momentum(optimizer, taken.setting, 0.0)
    if is_legacy(optimizer):
        _scale_legacy_updates(optimizer, taken)
    else:
        _scale_updates(optimizer, taken)
        _update_by_stage(optimizer, taken)
    _drop_loaded(optimizer, taken)
    get_config = optimizer.get_config
    optimizer.get_config = lambda: get_config() | {taken.setting: taken.value}


def _scale_updates(optimizer: Any, taken: Taken) -> None:
    """Multiply clipped gradients by `taken.step` in each update."""
    update, compiled = optimizer.update_step, optimizer._update_step_xla

    def scaled(gradient: Any, variable: Any) -> Any:
        return update(gradient * taken.step, variable)

    def keyed(gradient: Any, variable: Any, key: int) -> Any:
        """XLA compiles an update once for each key: that with a momentum gets another key."""
        return compiled(gradient, variable, key if taken.is_over else -key)

    optimizer.update_step, optimizer._update_step_xla = scaled, keyed


def _update_by_stage(optimizer: Any, taken: Taken) -> None:
    """Have the optimizer apply gradients as the guard's stage says."""
    apply = optimizer._internal_apply_gradients

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def by_stage(grads_and_vars: Any) -> Any:
        pairs = list(grads_and_vars)
        update = functools.partial(apply, pairs)
        update_by_stage(optimizer, taken, pairs, update, lambda: optimizer.learning_rate)
        return tf.identity(optimizer.iterations)

    optimizer._internal_apply_gradients = by_stage


def _scale_legacy_updates(optimizer: Any, taken: Taken) -> None:
    """As `_scale_updates`, for a legacy optimizer; also write zeros to Adam's momentum."""
    update = optimizer._resource_apply_dense

    def scaled(gradient: Any, variable: Any, *rest: Any) -> Any:
        result = update(gradient * taken.step, variable, *rest)
        if not taken.is_over or taken.setting == "momentum":
            return result
        slot = optimizer.get_slot(variable, "m")
        with tf.control_dependencies([] if result is None else [result]):
            return slot.assign(tf.zeros_like(slot))  # so that zeros are saved

    optimizer._resource_apply_dense = scaled


def _drop_loaded(optimizer: Any, taken: Taken) -> None:
    """Make an optimizer warn when a momentum is loaded, and set the momentum to zero.

    A momentum that a guard has handed back stays.
    """

    def watched(load: Any) -> Any:
        @functools.wraps(load)
        def loaded(saved: Any) -> None:
            load(saved)
            if taken.is_over and not taken.is_handed_over and has_gathered(optimizer):
                for slot in slots_of(optimizer):
                    slot.assign(tf.zeros_like(slot))
                taken.warn_of_loaded(optimizer)

        return loaded

    for name in ("set_weights", "load_own_variables"):
        if hasattr(optimizer, name):
            setattr(optimizer, name, watched(getattr(optimizer, name)))


def update_by_arrivals(optimizer: Any, by: ByArrivals) -> None:
    """Have each update depend on arrivals; what XLA compiles calls the same `update_step`."""
    if is_legacy(optimizer):
        own = optimizer._resource_apply_dense

        def dense(gradient: Any, variable: Any, *rest: Any) -> Any:
            update = functools.partial(own, gradient, variable, *rest)
            rate = functools.partial(optimizer._decayed_lr, variable.dtype.base_dtype)
            return by.update(optimizer, gradient, variable, update, rate)

        optimizer._resource_apply_dense = dense
        return
    own_step, compiled = optimizer.update_step, optimizer._update_step_xla

    def step(gradient: Any, variable: Any) -> Any:
        update = functools.partial(own_step, gradient, variable)
        return by.update(optimizer, gradient, variable, update, lambda: optimizer.learning_rate)

    def keyed(gradient: Any, variable: Any, key: int) -> Any:
        """XLA compiles an update once for each key: one that depends on arrivals has another."""
        return compiled(gradient, variable, -key if by.follows(variable) else key)

    optimizer.update_step, optimizer._update_step_xla = step, keyed
