"""Waiting for the moment at which a training library has prepared both model and optimizer.

Libraries wrap a model where callbacks do not see it. PyTorch calls global hooks with every module
and every optimizer.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from horovod_topk.errors import ConfigError
from horovod_topk.torch_training.tracing import untraced


def before_first_forward(model: nn.Module, call: Callable[[nn.Module], None]) -> Any:
    """Call a function once, before the first forward that computes gradients.

    Args:
        model: a module; a forward of it, or of a module that contains it, counts.
        call: it gets the outermost of these modules.
    """

    @untraced
    def hook(module: nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled() and any(each is model for each in module.modules()):
            handle.remove()
            call(module)

    handle = register_module_forward_pre_hook(hook)
    return handle


def before_every_step(method: Any) -> None:
    """Call a bound method with the optimizer before each step of any, while its object lives."""
    held = weakref.WeakMethod(method)

    @untraced
    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        if (call := held()) is not None:
            call(optimizer)

    register_optimizer_step_pre_hook(hook)


def living(kind: type, wanted: Callable[[Any], bool], cure: str) -> Any:
    """Return the object of a class in memory that is wanted; it takes a tenth of a second."""
    every = [each for each in gc.get_objects() if issubclass(type(each), kind)]
    found = next(filter(wanted, every), None)
    if found is None:
        raise ConfigError(f"no {kind.__name__} was given the compressor", cure=cure)
    return found
