"""Momentum correction beside PyTorch's optimizers: never applied twice, and never not at all."""

from __future__ import annotations

import logging
from typing import Any

from horovod_topk.errors import ConfigError

log = logging.getLogger("horovod_topk")


def check_not_twice(optimizer: Any, momentum: float) -> None:
    """Refuse an optimizer that would apply a momentum of its own to corrected gradients.

    Raises:
        ConfigError: it has one, or is not one whose momentum can be corrected.
    """
    if not momentum:
        return
    for number, group in enumerate(optimizer.param_groups):
        if "momentum" not in group:
            raise ConfigError(
                f"momentum={momentum} was given, and {type(optimizer).__name__} has no setting "
                "'momentum' that it could stand for",
                cure="Use momentum correction with torch.optim.SGD, or leave momentum= out",
            )
        if group["momentum"]:
            raise ConfigError(
                f"momentum={momentum} was given, and parameter group {number} of the optimizer has "
                f"momentum={group['momentum']}: it would be applied twice",
                cure="Pass momentum=0 to the optimizer, or to TopKEF",
            )


def hand_over(optimizer: Any, momentum: float, *, nesterov: bool) -> None:
    """Let the optimizer apply it where nothing is compressed: without sparsity they are the same.

    Raises:
        ConfigError: as `check_not_twice`.
    """
    check_not_twice(optimizer, momentum)
    if momentum:
        for group in optimizer.param_groups:
            group["momentum"], group["nesterov"] = momentum, nesterov
        log.warning("TopKEF compresses nothing, and leaves momentum=%s to SGD", momentum)
