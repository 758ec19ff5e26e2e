"""Copies of Keras 3 optimizers with their settings, slots and counters.

`from_config(get_config())` alone loses slots and counters, exclusions from weight decay, and
learning-rate schedules that Keras cannot find by name.
"""

from __future__ import annotations

import logging
from typing import Any

import keras

from horovod_topk.errors import UnsupportedOperationError

log = logging.getLogger("horovod_topk")


def copied(optimizer: Any, cls: Any, inner: Any = None) -> Any:
    """Copy an optimizer to a given class, sharing nothing with the original.

    inner: the class for the optimizer inside a loss scale, if it changes.
    """
    copy = blank(optimizer, cls, inner)
    _build_and_assign(copy, optimizer)
    return copy


def with_loss_scale(optimizer: Any) -> Any:
    """Return the optimizer, or a copy within a loss scale where Keras would add one."""
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if scales or keras.config.dtype_policy().name != "mixed_float16":
        return optimizer
    log.info('policy "mixed_float16": %s gets a dynamic loss scale', type(optimizer).__name__)
    return keras.optimizers.LossScaleOptimizer(copied(optimizer, type(optimizer)))


def blank(optimizer: Any, cls: Any, inner: Any = None) -> Any:
    """Copy an optimizer without building the copy."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        config, original = optimizer.get_config(), optimizer.inner_optimizer
        del config["inner_optimizer"]
        return cls(blank(original, inner or type(original)), **config)
    config = _config_of(optimizer)
    copy = cls.from_config(config)
    for suffix in ("", "_pattern", "_cache"):
        name = f"_exclude_from_weight_decay{suffix}"
        if hasattr(optimizer, name):
            setattr(copy, name, getattr(optimizer, name))
    return copy


def _config_of(optimizer: Any) -> dict[str, Any]:
    """`get_config()`, with a schedule or function as the learning rate kept as it is."""
    rate = optimizer._learning_rate
    if isinstance(rate, keras.Variable):
        config: dict[str, Any] = optimizer.get_config()
        return config
    try:
        optimizer._learning_rate = 0.0  # Keras would look for the schedule's configuration
        return {**optimizer.get_config(), "learning_rate": rate}
    finally:
        optimizer._learning_rate = rate


def _build_and_assign(copy: Any, optimizer: Any) -> None:
    """Build the copy, and copy slots, counters and the learning rate."""
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None and inner.built:
        copy.build(inner._trainable_variables)
        _assign(copy.inner_optimizer, inner)
    elif optimizer.built:
        copy.build(optimizer._trainable_variables)
    if inner is None or optimizer.built:
        _assign(copy, optimizer)


def _assign(copy: Any, optimizer: Any) -> None:
    mine, theirs = copy._variables, optimizer._variables
    if len(mine) != len(theirs):
        raise UnsupportedOperationError(
            f"a copy of this {type(optimizer).__name__} has {len(mine)} variables, the optimizer "
            f"{len(theirs)}: its state would be lost",
            cure="Wrap the optimizer before it is built",
        )
    for ours, original in zip(mine, theirs, strict=True):
        ours.assign(original)
