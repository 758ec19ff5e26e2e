"""Keeps torch.compile from tracing this package's hooks, and CUDA graphs from recording them."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from horovod_topk.errors import UnsupportedOperationError

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


def refuse_recording(what: str, device: torch.device) -> None:
    """Refuse to be recorded in a CUDA graph.

    The host reads in each step which payloads count, and what it decides would be missing from a
    replay.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise UnsupportedOperationError(
            f"{what} would be recorded in a CUDA graph, and a replay would leave out what the host "
            "decides in each step",
            cure="Record forward and loss alone, as torch.cuda.make_graphed_callables does before "
            "the model is wrapped; exchange and optimizer.step() run outside of graphs",
        )
