"""Checks of a Horovod optimizer's step: all gradients were exchanged before they are applied.

Ranks that step on local gradients diverge silently. Each check raises before the step has changed
anything, except `check_after`, which finds gradients that a closure computed within the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from horovod_topk.errors import StepBeforeSynchronizeError
from horovod_topk.torch_training import stepping
from horovod_topk.torch_training.stepping import closure_of

_CURE = (
    "Call optimizer.synchronize() at the end of the closure, and step inside "
    "optimizer.skip_synchronize()"
)


def check_before(optimizer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a step on gradients that are not, or will not be, exchanged.

    Args:
        optimizer: a distributed optimizer.
        args: positional arguments of the `step` call, with the optimizer as the first.
        kwargs: keyword arguments of the `step` call.

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
    if closure_of(args, kwargs) is not None:
        raise StepBeforeSynchronizeError(
            "step(closure) exchanges gradients before it calls the closure, and would apply those "
            "that the closure makes unexchanged",
            cure=_CURE,
        )
    check_all_are_known(optimizer)


def check_after(optimizer: Any) -> None:
    """Refuse to go on after a closure's gradients were applied without being exchanged.

    Raises:
        StepBeforeSynchronizeError: such gradients were applied.
    """
    if optimizer._handles:
        raise StepBeforeSynchronizeError(
            "a closure made gradients that were applied before they were exchanged, and ranks "
            "differ from here on",
            cure=_CURE,
        )


def check_all_are_known(optimizer: Any) -> None:
    """Refuse gradients of parameters without hooks, as they were frozen at construction.

    Raises:
        UnsupportedOperationError: another parameter has a gradient.
    """
    known = {id(p) for p in optimizer._requires_update}
    stepping.check_all_are_known(optimizer, known, optimizer._parameter_names)
