"""Learning rates of an optimizer's parameter groups, for learning-rate rescaling of residuals."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

from horovod_topk.core.rates import Rates, fall_of
from horovod_topk.errors import ConfigError
from horovod_topk.methods.protocol import Method
from horovod_topk.torch_training.momentum import Loan


def followed(
    optimizer: Any, config: Method, names: Mapping[Any, str], loan: Loan | None = None
) -> Rates | None:
    """Learning rates that residuals are rescaled by; None if `follow_lr` is off.

    Rates are read when a step's first bucket is sent, before `optimizer.step()`. If a scheduler
    steps after the optimizer, as PyTorch recommends, the next step uses the new rate; if it steps
    before the optimizer, the new rate is used a step late. Reading a rate that is a tensor on an
    accelerator waits for the device.

    names: name of each parameter; parameters without a name are left out.
    loan: the momentum takeover, if there is one: SGD has another learning rate while it steps.

    Raises:
        ConfigError: a parameter group has no learning rate.
    """
    if not config.follow_lr:
        return None
    for number, group in enumerate(optimizer.param_groups):
        if "lr" not in group:
            raise ConfigError(
                f"follow_lr=True was given, and parameter group {number} of "
                f"{type(optimizer).__name__} has no lr",
                cure="Leave follow_lr= out",
            )
    held = weakref.ref(optimizer)  # weak: the optimizer refers to the state, which refers to this
    return Rates(lambda: now(held(), names, loan), partial(fall_of, config))


def has_rates(optimizer: Any) -> bool:
    """Whether every parameter group has a learning rate."""
    return all("lr" in group for group in optimizer.param_groups)


def now(optimizer: Any, names: Mapping[Any, str], loan: Loan | None = None) -> dict[str, float]:
    """The present learning rate of each parameter, by name."""
    rates = dict[str, float]()
    for group in optimizer.param_groups if loan is None else loan.groups(optimizer):
        rate = float(group["lr"])
        rates |= {names[p]: rate for p in group["params"] if p in names}
    return rates
