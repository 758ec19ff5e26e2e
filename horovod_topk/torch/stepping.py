"""What an optimizer's step has to find: gradients that were exchanged, and all of them.

Ranks that step on gradients of their own drift apart without a word. Each check raises before the
step has changed anything, but for the last, which is there for what closures do within a step.
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
    if closure_of(args, kwargs) is not None:
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
    known = {id(p) for p in optimizer._requires_update}
    stepping.check_all_are_known(optimizer, known, optimizer._parameter_names)
