"""What an optimizer's step has to find: gradients that were exchanged, and all of them.

Ranks that step on gradients of their own drift apart without a word. Each check raises before the
step has changed anything, but for the last, which is there for what closures do within a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.optim import LBFGS

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
    if _closure_of(args, kwargs) is not None:
        raise StepBeforeSynchronizeError(
            "step(closure) exchanges gradients before it calls the closure, and would apply those "
            "that the closure makes unexchanged",
            cure=_CURE,
        )
    check_all_are_known(optimizer)


def check_evaluates_once(optimizer: Any) -> None:
    """Refuse an optimizer that is known to need several gradients for one step.

    Raises:
        UnsupportedOperationError: it does.
    """
    if not isinstance(optimizer, LBFGS):
        return
    for group in optimizer.param_groups:
        if group["max_iter"] > 1 or group["line_search_fn"] is not None:
            raise _evaluates_again(
                f"{type(optimizer).__name__} has max_iter={group['max_iter']} and line_search_fn="
                f"{group['line_search_fn']!r}, and so evaluates its closure several times a step"
            )


def with_one_exchange(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    exchanges: Callable[[], int],
    failed: Callable[[], None],
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Have a step's closure refuse to be evaluated once more after an exchange in that step.

    A step commits one exchange. Of two, the first would be applied and stay in the residual too.

    Args:
        args: of a `step` that begins now, itself among them.
        kwargs: the same.
        exchanges: how many there have been.
        failed: called where the closure raises, since the step does not go on then.

    Returns:
        Arguments to go on with.
    """
    closure, before = _closure_of(args, kwargs), exchanges()
    if closure is None:
        return args, kwargs

    def evaluate() -> Any:
        if exchanges() != before:
            raise _evaluates_again(
                "the optimizer evaluated its closure once more in one step, which had exchanged "
                "gradients already, and may have moved parameters by them"
            )
        try:
            return closure()
        except BaseException:
            failed()
            raise

    if "closure" in kwargs:
        return args, {**kwargs, "closure": evaluate}
    return (args[0], evaluate, *args[2:]), kwargs


def _closure_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], Any] | None:
    """The one given to a step, if one was."""
    closure: Callable[[], Any] | None = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return closure


def _evaluates_again(problem: str) -> UnsupportedOperationError:
    return UnsupportedOperationError(
        f"{problem}, and error feedback knows of one exchange a step",
        cure="Use compression=hvd.Compression.none with such an optimizer, or have it evaluate its "
        "closure once a step (LBFGS: max_iter=1, without line_search_fn)",
    )


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
