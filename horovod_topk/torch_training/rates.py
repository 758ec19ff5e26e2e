"""Learning rates of an optimizer's parameter groups, for learning-rate rescaling of residuals."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

from horovod_topk.core.run.optimizers import kind_of
from horovod_topk.core.state.learning_rates import Rates, fall_of
from horovod_topk.errors import ConfigError
from horovod_topk.methods.protocol import Method
from horovod_topk.torch_training.group_settings import number_of


def followed(optimizer: Any, config: Method, names: Mapping[Any, str]) -> Rates | None:
    """Learning rates that residuals are rescaled by; None if `follow_lr` is off.

    Rates are read when a step's first bucket is sent, before `optimizer.step()`. If a scheduler
    steps after the optimizer, as PyTorch recommends, the next step uses the new rate; if it steps
    before the optimizer, the new rate is used a step late. Reading a rate that is a tensor on an
    accelerator waits for the device.

    A rate that becomes None, or anything else that is no number, leaves residuals in the units that
    they have, as a rate of 0 does.

    names: name of each parameter; parameters without a name are left out.

    Raises:
        ConfigError: a parameter group has no learning rate, or none that is a number.
    """
    if not config.follow_lr:
        return None
    if why := why_not_followed(optimizer):
        raise ConfigError(f"follow_lr=True was given, and {why}", cure="Leave follow_lr= out")
    held = weakref.ref(optimizer)  # weak: the optimizer refers to the state, which refers to this
    return Rates(lambda: now(held(), names), partial(fall_of, config))


def why_not_followed(optimizer: Any) -> str:
    """Reason why residuals cannot follow an optimizer's learning rates; empty: they can."""
    for number, group in enumerate(optimizer.param_groups):
        if number_of(group.get("lr")) is None:
            shown = f"lr={group['lr']!r:.60}, which is no number" if "lr" in group else "no lr"
            return f"parameter group {number} of {kind_of(optimizer)} has {shown}"
    return ""


def now(optimizer: Any, names: Mapping[Any, str]) -> dict[str, float]:
    """The present learning rate of each parameter, by name."""
    rates = dict[str, float]()
    for group in optimizer.param_groups:
        rate = number_of(group.get("lr"))
        if rate is not None:
            rates |= {names[p]: rate for p in group["params"] if p in names}
    return rates
