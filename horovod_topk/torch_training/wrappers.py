"""Refuses objects whose steps call no hooks, such as a wrapper of another optimizer.

Compression follows an optimizer by PyTorch's hooks on its steps. `torch.optim.Optimizer.__init__`
sets these up, for the object and its class. Wrappers such as Lookahead, and those of Accelerate and
Schedule-Free, leave it out: compression is attached to the optimizer inside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

from horovod_topk.errors import ConfigError

ONE = "Pass a torch.optim.Optimizer of all parameters that the model trains"
REGISTER = (
    "register_step_pre_hook",
    "register_step_post_hook",
    "register_state_dict_pre_hook",  # PyTorch 2.1
)
DEEPEST = 4  # wrappers around one another


def check_has_hooks(optimizer: Any) -> None:
    """Refuse an object whose steps call no hooks, before any hook is registered.

    Raises:
        ConfigError: it is no optimizer, or wraps one without having called `Optimizer.__init__`.
    """
    if _has_hooks(optimizer):
        return
    kind = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
    found = next(_inside(optimizer, "optimizer"), None)
    if found is not None:
        raise ConfigError(
            f"{kind} wraps an optimizer, and its own steps call no hooks of PyTorch, which "
            "compression needs",
            cure=f"Pass the optimizer inside it, {found}, and go on calling the wrapper's step()",
        )
    if isinstance(optimizer, Optimizer):
        problem = f"{kind} has not called Optimizer.__init__, so that its steps call no hooks"
        cure = "Call super().__init__(params, defaults) in its __init__, or pass the optimizer that"
        raise ConfigError(problem, cure=f"{cure} it wraps")
    is_module = isinstance(optimizer, nn.Module)
    cure = "Pass the model first, and then the optimizer" if is_module else ONE
    raise ConfigError(f"the optimizer is {optimizer!r:.60}, which is no optimizer", cure=cure)


def _has_hooks(optimizer: Any) -> bool:
    """Whether an optimizer's steps call hooks, and hooks can be registered with it."""
    if not isinstance(optimizer, Optimizer):
        return False
    if not getattr(type(optimizer).step, "hooked", False):  # set by Optimizer.__init__
        return False
    try:
        for name in REGISTER:
            if hasattr(optimizer, name):
                getattr(optimizer, name)(lambda *_: None).remove()
    except AttributeError:  # a dictionary that Optimizer.__init__ makes is missing
        return False
    return hasattr(optimizer, "param_groups") and hasattr(optimizer, "state")


def _inside(wrapper: Any, path: str, depth: int = DEEPEST) -> Iterator[str]:
    """Yield expressions for the optimizers with hooks among an object's attributes."""
    attributes = getattr(wrapper, "__dict__", {}) if depth else {}
    for own, value in attributes.items():
        public = own.lstrip("_")  # as Lightning's property `optimizer`
        name = public if getattr(wrapper, public, None) is value else own
        if value is not wrapper and hasattr(value, "param_groups") and hasattr(value, "step"):
            if _has_hooks(value):
                yield f"{path}.{name}"
            else:
                yield from _inside(value, f"{path}.{name}", depth - 1)
