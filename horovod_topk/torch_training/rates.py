"""The learning rates of an optimizer's parameter groups, as residuals follow them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from horovod_topk.core.rates import Rates
from horovod_topk.errors import ConfigError
from horovod_topk.methods.protocol import Method
from horovod_topk.torch_training.momentum import Loan


def followed(
    optimizer: Any, config: Method, names: Mapping[Any, str], loan: Loan | None = None
) -> Rates | None:
    """Those that residuals follow, if they do.

    They are read when a step's first bucket is sent, which is before `optimizer.step()`: a
    scheduler that steps after that, as PyTorch has it, is heard of at once, one that steps before
    it a step late. A rate that is a tensor on an accelerator is waited for.

    names: of parameters; those without one are left out.
    loan: the optimizer's own momentum, if it is taken over: SGD has another rate while it steps.

    Raises:
        ConfigError: a parameter group has none.
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
    held = weakref.ref(optimizer)  # it holds the state, and so this
    return Rates(lambda: now(held(), names, loan))


def has_rates(optimizer: Any) -> bool:
    """Whether every parameter group has a learning rate."""
    return all("lr" in group for group in optimizer.param_groups)


def now(optimizer: Any, names: Mapping[Any, str], loan: Loan | None = None) -> dict[str, float]:
    """The rate of each parameter, by name."""
    rates = dict[str, float]()
    for group in optimizer.param_groups if loan is None else loan.groups(optimizer):
        rate = float(group["lr"])
        rates |= {names[p]: rate for p in group["params"] if p in names}
    return rates
