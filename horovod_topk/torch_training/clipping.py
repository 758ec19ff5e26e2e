"""Gradient clipping in PyTorch; `core.codec.clipping` gives the threshold and the reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from horovod_topk.core.codec.clipping import LocalClip, Scope
from horovod_topk.torch_training.tracing import untraced

_STRETCH = 1 << 16  # elements of a stretch that is summed in float32


def clip_alone(
    optimizer: Any, clip_norm: float, gradients: Callable[[], Sequence[Tensor]] | None = None
) -> Any:
    """Clip gradients before each step where nothing is exchanged, as with one rank.

    gradients: returns the gradients of a step, clipped in place; None: the `grad` of every
        parameter.

    Returns:
        The handle of the hook that was registered with the optimizer.
    """
    clip = local_clip(clip_norm, "sum")

    @torch.no_grad()
    def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        scale = getattr(optimizer, "grad_scale", None)  # set by GradScaler if the step unscales
        clip.begin(ranks=1, units=1.0 if scale is None else float(scale))
        by_device: dict[torch.device, list[Tensor]] = {}
        for gradient in _gradients_of(optimizer) if gradients is None else gradients():
            by_device.setdefault(gradient.device, []).append(gradient)
        for each in by_device.values():
            clip.clip(each)

    return optimizer.register_step_pre_hook(untraced(before_step))


def _gradients_of(optimizer: Any) -> list[Tensor]:
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return [p.grad for p in parameters if p.grad is not None]


def local_clip(clip_norm: float, reduction: str) -> LocalClip[Tensor]:
    """Make the clipper of a rank's gradients, bucket by bucket as they become ready."""
    return LocalClip(clip_norm, reduction, Scope.SO_FAR, Norms())


class Norms:
    """`core.codec.clipping.Norms`: floats for host gradients, tensors on accelerators.

    To avoid waiting for accelerators, the gradients on each device are clipped by their own norm.
    """

    def place(self, gradients: Sequence[Tensor]) -> object:
        """`Norms.place`: the device."""
        return gradients[0].device

    def norm(self, gradients: Sequence[Tensor], before: float | Tensor) -> float | Tensor:
        """`Norms.norm`."""
        if gradients[0].device.type == "cpu" and not isinstance(before, Tensor):
            return math.hypot(before, *map(_norm_on_host, gradients))
        earlier = torch.as_tensor(before, device=gradients[0].device).double()
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients]
        norm: Tensor = torch.linalg.vector_norm(torch.stack([earlier, *norms]))
        return norm

    def reduce(self, gradients: Sequence[Tensor], threshold: float, norm: float | Tensor) -> None:
        """`Norms.reduce`."""
        if isinstance(norm, Tensor):
            factor = (threshold / norm).clamp(max=1.0)
            for gradient in gradients:
                gradient.mul_(factor.to(gradient.dtype))
        elif threshold < norm < math.inf:
            for gradient in gradients:
                gradient.mul_(threshold / norm)


def _norm_on_host(gradient: Tensor) -> float:
    """Euclidean norm from stretches, since one long float32 sum loses its third digit.

    float64 sums cost many times as much, and are used only where float32 overflows.
    """
    dtype = torch.float64 if gradient.dtype is torch.float64 else torch.float32
    flat: Any = gradient.reshape(-1)
    norms = torch.stack([torch.linalg.vector_norm(s, dtype=dtype) for s in flat.split(_STRETCH)])
    norm = float(torch.linalg.vector_norm(norms, dtype=torch.float64))
    return norm if math.isfinite(norm) else float(gradient.double().norm())
