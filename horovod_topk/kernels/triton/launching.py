"""Launches Triton kernels on a device's current stream, without waiting for them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

# Sums and products are rounded separately, as in `Ops`: a fused multiply-add rounds once.
FOUR_WARPS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
EIGHT_WARPS: dict[str, Any] = {**FOUR_WARPS, "num_warps": 8}
SIXTEEN_WARPS: dict[str, Any] = {**FOUR_WARPS, "num_warps": 16}


def launch(kernel: Any, programs: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel with a number of programs in each dimension."""
    kernel[programs](*arguments, **constants)


def on(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which `device` is the current CUDA device, on which Triton launches."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
