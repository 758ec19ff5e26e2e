"""Launches Triton kernels on a device's current stream, without waiting for them."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

# Sums and products are rounded separately, as in `Ops`: a fused multiply-add rounds once.
FOUR_WARPS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
EIGHT_WARPS: dict[str, Any] = {**FOUR_WARPS, "num_warps": 8}
SIXTEEN_WARPS: dict[str, Any] = {**FOUR_WARPS, "num_warps": 16}

ALIGNED = 16  # bytes: Triton compiles a kernel anew for tensors with other addresses
# For AMD's GPUs it compiles for more than `_kind` says.
IS_KNOWN = torch.version.hip is None

_compiled: dict[Hashable, tuple[Any, list[Any]]] = {}  # and the values of its constants


def launch(kernel: Any, programs: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel with a number of programs in each dimension.

    Triton finds or compiles the kernel for the first arguments of their kinds. Later ones go to the
    compiled kernel at once: Triton's look-up takes several times as long as the launch. Its hooks
    before that look-up, and settings that change later, have no effect on them.

    Args:
        kernel: a function under `triton.jit`.
        programs: their number in one to three dimensions.
        arguments: the kernel's first ones; the first is a tensor. Integers count as constants here.
        constants: all others of the kernel, and Triton's options.
    """
    kinds = tuple([_kind(argument) for argument in arguments])
    key = kernel.fn, arguments[0].get_device(), kinds, tuple(constants.items())
    found = _compiled.get(key)
    if found is not None:
        compiled, values = found
        compiled[(*programs, 1, 1)](*arguments, *values)
        return
    compiled = kernel[programs](*arguments, **constants)
    # The interpreter compiles nothing; where Triton compiles in threads, there is no kernel yet.
    if IS_KNOWN and hasattr(compiled, "__getitem__"):
        names = kernel.arg_names[len(arguments) :]
        _compiled[key] = compiled, [constants[name] for name in names]


def on(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which `device` is the current CUDA device, on which Triton launches."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _kind(argument: Any) -> Hashable:
    """Return what Triton compiles for, or more: arguments of a kind share a compiled kernel."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % ALIGNED == 0
    return float if isinstance(argument, float) else argument
