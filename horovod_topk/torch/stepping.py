"""What an optimizer's step has to find: gradients that were exchanged, and all of them.

Ranks that step on gradients of their own drift apart without a word. Each check raises before the
step has changed anything, but for the last, which is there for what closures do within a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from horovod_topk.errors import StepBeforeSynchronizeError, UnsupportedOperationError

_CURE = (
    "Call optimizer.synchronize() at the end of the closure, and step inside "
    "optimizer.skip_synchronize()"
)


def check_before(optimizer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a step on gradients that are not, or will not be, exchanged.

    Args:
        optimizer: a distributed one.
        args: of its `step`, itself among them.
        kwargs: the same.

    Raises:
        StepBeforeSynchronizeError, UnsupportedOperationError: see the message.
    """
    if not optimizer._should_synchronize:
        if optimizer._handles:
            raise StepBeforeSynchronizeError(
                "step() was called inside skip_synchronize() on gradients that have not been "
                "exchanged",
                cure="Call optimizer.synchronize() after backward() and before this step",
            )
        check_all_are_known(optimizer)
        return
    if kwargs.get("closure", args[1] if len(args) > 1 else None) is not None:
        raise StepBeforeSynchronizeError(
            "step(closure) exchanges gradients before it calls the closure, and would apply those "
            "that the closure makes unexchanged",
            cure=_CURE,
        )
    check_all_are_known(optimizer)


def check_after(optimizer: Any) -> None:
    """Refuse to go on from a closure whose gradients were applied and never exchanged.

    Raises:
        StepBeforeSynchronizeError: they were.
    """
    if optimizer._handles:
        raise StepBeforeSynchronizeError(
            "a closure made gradients that were applied before they were exchanged, and ranks "
            "differ from here on",
            cure=_CURE,
        )


def check_all_are_known(optimizer: Any) -> None:
    """Horovod has hooks for parameters that were trainable when the optimizer was built.

    Raises:
        UnsupportedOperationError: another one has a gradient.
    """
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.requires_grad and p.grad is not None and p not in optimizer._requires_update:
                raise UnsupportedOperationError(
                    "its gradient would be applied without being exchanged: it had "
                    "requires_grad=False, or was in no parameter group, when the distributed "
                    "optimizer was built",
                    tensor=optimizer._parameter_names.get(p, f"of shape {list(p.shape)}"),
                    cure="Build the distributed optimizer with all that will ever be trained, and "
                    "set requires_grad=False afterwards for as long as it is not",
                )
