"""Checks of an optimizer's step: one exchange a step, of all parameters that have gradients."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

from torch.optim import LBFGS

from horovod_topk.errors import ConfigError, UnsupportedOperationError
from horovod_topk.torch_training.group_settings import number_of


def moved_by(optimizer: Any) -> Iterator[tuple[Any, bool]]:
    """Each parameter of an optimizer, and whether a step moves it: its learning rate is not 0.

    A rate that is a tensor on an accelerator waits for the device.
    """
    for group in optimizer.param_groups:
        moves = number_of(group.get("lr")) != 0.0
        for p in group["params"]:
            yield p, moves


def frozen(optimizer: Any, names: Mapping[Any, str]) -> set[str]:
    """Names of the parameters that steps do not move now.

    Their learning rate is 0, or they need no gradient any more.
    """
    still = {names[p] for p, moves in moved_by(optimizer) if not moves and p in names}
    return still | {name for p, name in names.items() if not p.requires_grad}


def check_evaluates_once(optimizer: Any) -> None:
    """Refuse an optimizer that needs several gradients for one step, such as LBFGS.

    Raises:
        UnsupportedOperationError: it needs several gradients.
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
    check: Callable[[], None] = lambda: None,
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Wrap a step's closure so that it raises if called again after an exchange.

    A step commits one exchange. After two, what the first one sent would be applied and stay in the
    residual too. Optimizers with a `first_step` and a `second_step` (Foret et al. 2021, Sharpness-
    Aware Minimization) take the first step back, and apply the last exchange alone.

    Args:
        args: positional arguments of the `step` call, with the optimizer as the first.
        kwargs: keyword arguments of the `step` call.
        exchanges: returns how many exchanges there have been.
        check: called after the closure, before the step goes on; may raise.

    Returns:
        The arguments to call `step` with.
    """
    closure, before = closure_of(args, kwargs), exchanges()
    if closure is None:
        return args, kwargs
    again = takes_back(args[0])

    def evaluate() -> Any:
        if exchanges() != before and not again:
            raise _evaluates_again(
                "the optimizer evaluated its closure once more in one step, which had exchanged "
                "gradients already, and may have moved parameters by them"
            )
        loss = closure()
        check()
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": evaluate}
    return (args[0], evaluate, *args[2:]), kwargs


def takes_back(optimizer: Any) -> bool:
    """Whether an optimizer takes the steps of a first gradient back, as SAM's variants do."""
    return hasattr(optimizer, "first_step") and hasattr(optimizer, "second_step")


def closure_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], Any] | None:
    """The closure that was passed to a step, or None."""
    closure: Callable[[], Any] | None = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return closure


def _evaluates_again(problem: str) -> UnsupportedOperationError:
    return UnsupportedOperationError(
        f"{problem}, and error feedback knows of one exchange a step",
        cure="Leave such an optimizer uncompressed (Horovod: hvd.Compression.none), or have it "
        "evaluate its closure once a step (LBFGS: max_iter=1, without line_search_fn)",
    )


def check_all_are_known(optimizer: Any, known: Container[Any], names: Mapping[Any, str]) -> None:
    """Refuse gradients of parameters that were not trained when the exchange was planned.

    Args:
        optimizer: the optimizer of the parameters.
        known: ids of the parameters whose gradients are exchanged.
        names: name of each parameter, for the message.

    Raises:
        UnsupportedOperationError: another parameter has a gradient.
    """
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.requires_grad and p.grad is not None and id(p) not in known:
                raise UnsupportedOperationError(
                    "its gradient would be applied without being exchanged: it had "
                    "requires_grad=False, or was in no parameter group, when the distributed "
                    "optimizer or model was built",
                    tensor=names.get(p, f"of shape {list(p.shape)}"),
                    cure="Build it with all that will ever be trained, and set requires_grad=False "
                    "afterwards for as long as it is not",
                )


def check_optimizer(optimizer: Any, names: Mapping[Any, str]) -> None:
    """Refuse an optimizer whose parameters are not the model's trained parameters.

    names: name of each parameter that the model trains.

    Raises:
        ConfigError: a parameter is missing in the optimizer or in the model.
    """
    stepped = {p for group in optimizer.param_groups for p in group["params"]}
    missing = next((name for p, name in names.items() if p not in stepped), None)
    if missing is not None or any(p.requires_grad and p not in names for p in stepped):
        raise ConfigError(
            "the optimizer has not all parameters that the model trains, or has others",
            tensor=missing,
            cure="Give each model one optimizer, of all that it trains: several, as Muon beside "
            "AdamW, in a class around them, as docs/ddp.md shows. Set requires_grad=False for what "
            "is not trained before the model is distributed",
        )
