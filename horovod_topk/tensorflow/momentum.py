"""Settings that depend on a Keras optimizer; its momentum is applied exactly once."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from horovod_topk.core.exchange.membership import why_inactive
from horovod_topk.core.run.base_compressor import BaseCompressor
from horovod_topk.core.run.optimizers import (
    HAS_NONE,
    advise,
    check_once,
    fitted,
    kind_of,
    none_to_correct,
    note_adapted,
    warn_of_clipping,
)
from horovod_topk.methods.protocol import Method
from horovod_topk.tensorflow.updates import Updates
from horovod_topk.updates import tracker
from horovod_topk.updates.formulas import LINEAR, UNKNOWN, default_ratio, family_of

log = logging.getLogger("horovod_topk")

KNOWN = "SGD, Adam or AdamW of Keras"
CLIPPING = ("clipnorm", "global_clipnorm", "clipvalue")  # settings of every optimizer of Keras
SETTINGS = {"SGD": "momentum", "Adam": "beta_1", "AdamW": "beta_1"}  # Keras class -> its momentum


@dataclass(frozen=True)
class Fitted:
    """A compressor with its settings for one optimizer, passed to Horovod as `compression=`."""

    compressor: BaseCompressor
    config: Method  # the compressor's settings, with those that depend on the optimizer
    updates: Updates | None = None  # that take the place of the optimizer's
    warnings: tuple[str, ...] = ()  # about the optimizer
    had_none: bool = False  # whether the optimizer had no momentum that it could be adapted to


def fitted_to(optimizer: Any, compressor: BaseCompressor, process_set: Any) -> Fitted:
    """Settings for an optimizer, and whether its steps depend on arrivals. Nothing is changed.

    Args:
        optimizer: an optimizer of Keras 3 or tf-keras, within a loss scale or not.
    """
    optimizer, config = getattr(optimizer, "inner_optimizer", optimizer), compressor.config
    if "follow_lr" in compressor.deferred:
        config = replace(config, follow_lr=_present(optimizer, "learning_rate") is not None)
    normalises = _is_adam(optimizer)
    kind, family = kind_of(optimizer), family_of(optimizer)
    first = _present(optimizer, "beta_1")
    config, why = fitted(
        config,
        compressor.deferred,
        kind,
        lambda: _why_left(optimizer),
        ratio=default_ratio(family, None if first is None else _number(first)),
        is_linear=family is LINEAR,
    )
    check_not_twice(optimizer, config)
    if not compresses(process_set):
        return Fitted(compressor, config)
    if why is None:
        warnings = note_adapted(kind, is_known=family is not UNKNOWN)
        if not _momentum_of(optimizer):
            return Fitted(compressor, config, Updates(tracker.OWN, family=family), warnings)
        rule = tracker.ADAM if normalises else tracker.SGD
        beta2 = _number(_present(optimizer, "beta_2")) if normalises else None
        return Fitted(compressor, config, updates=Updates(rule, beta2 or 0.0))
    has_beta1 = normalises and _number(_present(optimizer, "beta_1")) != 0.0
    warnings = advise(kind, config, why, normalises=has_beta1)
    return Fitted(compressor, config, warnings=warnings, had_none=why == HAS_NONE)


def compresses(process_set: Any) -> bool:
    """Whether gradients of this process set will be compressed; not before `hvd.init()`."""
    return hvd.is_initialized() and why_inactive(process_set) is None


def _why_left(optimizer: Any) -> str:
    """Reason why momentum="auto" leaves this optimizer as it is; empty: there is none."""
    if hasattr(optimizer, "_inner_optimizers"):
        return "it hands gradients on to other optimizers"
    if _is_a(optimizer, "ScheduleFreeAdamW"):
        return "it keeps weights beside the model's, which would not be corrected"
    setting, is_linear = _setting_of(optimizer), family_of(optimizer) is LINEAR
    if setting is None:
        return f"it is none of {KNOWN}" if is_linear else ""
    own = _momentum_of(optimizer)
    if own is None:
        return "it changes by itself"
    if not own:
        return HAS_NONE if is_linear else ""
    if setting == "beta_1" and _number(_present(optimizer, "beta_2")) is None:
        return "its beta_2 changes by itself"
    return ""


def check_not_twice(optimizer: Any, config: Method) -> None:
    """Refuse an optimizer that would apply a momentum of its own to corrected gradients.

    Args:
        optimizer: an optimizer of Keras 3 or tf-keras, within a loss scale or not; None: not known.
        config: settings with the momentum that is corrected; 0: off.
    """
    if optimizer is None or not config.momentum:
        return
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    kind, is_adam = kind_of(optimizer), _is_adam(optimizer)
    setting = "beta_1" if is_adam else "momentum"
    present = _present(optimizer, setting)
    if present is None:
        raise none_to_correct(config.momentum, kind, KNOWN)
    value = _number(present)
    check_once(
        kind,
        config.momentum,
        nesterov=config.nesterov,
        where="the optimizer",
        setting=setting,
        shown=present if value is None else value,
        applies=value != 0.0,
        off=f"{setting}=0.0",
        normalises=is_adam,
    )


def warn_of_late_momentum(optimizer: Any, fitted: Fitted) -> tuple[str, ...]:
    """Warn that an SGD without momentum, whose steps are not adapted, was given one since.

    Args:
        optimizer: an SGD of Keras 3 or tf-keras, within a loss scale or not; None: not known.
        fitted: the settings for it when it was distributed or adapted.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if not fitted.had_none or not _number(_present(optimizer, "momentum")):
        return ()
    why = "its momentum was set after TopKEF got to know it. Set it before"
    return advise(kind_of(optimizer), fitted.config, why, normalises=False)


def warn_of_late_clipping(optimizer: Any, momentum: float) -> tuple[str, ...]:
    """Warn that an SGD clips velocities instead of gradients, which makes its steps smaller.

    Adam and AdamW divide by the size of the gradients they get, so that clipping does not make
    their steps smaller.

    Args:
        optimizer: a distributed optimizer of Keras 3 or tf-keras, within a loss scale or not.
        momentum: the momentum that is corrected; 0: none.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    clips = [name for name in CLIPPING if getattr(optimizer, name, None) is not None]
    if not (momentum and clips and _is_a(optimizer, "SGD")):
        return ()
    shown = ", ".join(f"{name}={getattr(optimizer, name):g}" for name in clips)
    return (warn_of_clipping(momentum, f"{kind_of(optimizer)} has {shown}"),)


def is_of_keras(optimizer: Any) -> bool:
    """Whether an optimizer is of Keras 3 or tf-keras, or a subclass of one."""
    return any(map(_is_kerass, type(optimizer).__mro__))


def _setting_of(optimizer: Any) -> str | None:
    """Name of the momentum argument of Keras' own SGD, Adam or AdamW; None: another optimizer.

    Subclasses by others are excluded, as they may update variables differently.
    """
    cls = type(optimizer)
    return SETTINGS.get(cls.__name__) if _is_kerass(cls) else None


def _momentum_of(optimizer: Any) -> float | None:
    """Momentum of Keras' own SGD, Adam or AdamW; None: another optimizer, or it changes."""
    setting = _setting_of(optimizer)
    return None if setting is None else _number(_present(optimizer, setting))


def _is_adam(optimizer: Any) -> bool:
    return _is_a(optimizer, "Adam", "AdamW")


def _is_a(optimizer: Any, *names: str) -> bool:
    """Whether an optimizer is one of the named Keras classes, or a subclass."""
    return any(cls.__name__ in names for cls in type(optimizer).__mro__ if _is_kerass(cls))


def _is_kerass(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in ("keras", "tf_keras")


def _present(optimizer: Any, setting: str) -> Any:
    """Value of an optimizer's setting: a number, variable or function; None: no such setting."""
    older = getattr(optimizer, "_hyper", {})  # reading attributes of tf-keras makes variables
    return older[setting] if setting in older else getattr(optimizer, setting, None)


def _number(value: Any) -> float | None:
    """Convert a setting's value to a number; None for a function, such as a schedule."""
    with tf.init_scope():
        return None if callable(value) else float(value)
