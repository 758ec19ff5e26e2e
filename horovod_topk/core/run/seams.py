"""What the adapters to Horovod have in common: wrapped functions, `op=`, and no `join()`."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from horovod_topk.errors import UnsupportedOperationError

Function = Callable[..., Any]


class Labelled(Protocol):
    """The state of an optimizer."""

    label: str  # its name in messages


def wrap(*wrappers: tuple[Any, str, Callable[[Function], Function]]) -> None:
    """Replace attributes by what a wrapper makes of each, unless the first is replaced already."""
    owner, attribute, _ = wrappers[0]
    if hasattr(getattr(owner, attribute), "_topkef"):
        return
    for owner, attribute, wrapper in wrappers:
        original = getattr(owner, attribute)
        wrapped: Any = functools.wraps(original)(wrapper(original))
        wrapped._topkef = True
        setattr(owner, attribute, wrapped)


def refusing_join(live: Callable[[], Iterable[Labelled]]) -> Callable[[Function], Function]:
    """A wrapper of `hvd.join()` that refuses it while there are states that exchange payloads."""

    def wrapper(original: Function) -> Function:
        def join(*args: Any, **kwargs: Any) -> Any:
            if [*live()]:
                gc.collect()  # Horovod's optimizers are reference cycles: delete unreachable ones
            for state in live():
                raise UnsupportedOperationError(
                    f"hvd.join() was called while {state.label} exchanges payloads, which a joined "
                    "rank cannot take part in",
                    cure="Give every rank the same number of steps, for example by repeating or "
                    "dropping samples, or delete the optimizer or model first",
                )
            return original(*args, **kwargs)

        return join

    return wrapper


def reduction_of(op: object, hvd: Any) -> str:
    """The name of Horovod's reduction in plans: "average" or "sum"."""
    reductions = {hvd.Average: "average", hvd.Sum: "sum"}
    if op not in reductions:
        raise UnsupportedOperationError(
            f"op={_name(op, hvd)} combines dense gradients in a way that sparse payloads cannot "
            "express",
            cure="Use op=hvd.Average or op=hvd.Sum with TopKEF, or another op with "
            "Compression.none",
        )
    return reductions[op]


def _name(op: object, hvd: Any) -> str:
    names = ("Adasum", "Min", "Max", "Product")
    return next((f"hvd.{name}" for name in names if op == getattr(hvd, name, None)), repr(op))
