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

KINDS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}  # dtypes, as in a recipe
ALIGNED = 16  # bytes: Triton compiles a kernel anew for tensors with other addresses
# On AMD's GPUs Triton also compiles a kernel anew for large tensors, which `_kind` does not see.
KEEPS = torch.version.hip is None  # whether compiled kernels are kept for later launches

_compiled: dict[Hashable, tuple[Any, list[Any]]] = {}  # compiled kernels and their constants


def launch(kernel: Any, programs: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel with a number of programs in each dimension.

    The first launch with arguments of some kinds goes through Triton, which finds or compiles the
    kernel. Later launches go to the compiled kernel directly, as Triton's look-up takes several
    times as long as a launch. Triton's `pre_run_hooks`, and settings of Triton that change after
    the first launch, have no effect on later ones.

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
    if KEEPS and hasattr(compiled, "__getitem__"):
        names = kernel.arg_names[len(arguments) :]
        _compiled[key] = compiled, [constants[name] for name in names]


def on(device: torch.device) -> AbstractContextManager[None]:
    """Return a context that makes `device` the current CUDA device: Triton launches on that."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _kind(argument: Any) -> Hashable:
    """Return the kind of an argument. Arguments of equal kinds can share a compiled kernel."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % ALIGNED == 0
    return float if isinstance(argument, float) else argument
