"""Keeps torch.compile from tracing this package's hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def untraced(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Have torch.compile call a function as it is, instead of tracing what it does.

    A hook that is traced is compiled anew whenever one of the numbers and objects that it reads has
    changed. `torch.compiler.disable` imports the compiler at once, which takes a second; this
    imports it in the first call, as PyTorch's optimizers do.
    """
    disabled: Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]] | None
    disabled = getattr(torch, "_disable_dynamo", None)  # PyTorch 2.1
    return function if disabled is None else disabled(function)
