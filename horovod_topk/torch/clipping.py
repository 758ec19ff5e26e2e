"""Clipping of local gradients while they arrive, bucket by bucket.

`horovod_topk.core.clipping` says to what norm, and why. That norm, t, is of all of a rank's
gradients, and a bucket is sent before the last of them is there: waiting for it would leave nothing
to do while backward goes on. Bucket b, with gradients g_b, is therefore scaled by

    c_b = min(1, t / sqrt(||g_1||^2 + ... + ||g_b||^2))

from those that are there, in the order in which buckets are complete. So gradients whose norm is
within t are never changed; one bucket is clipped exactly; of B buckets the last one is, no bucket
exceeds t, and all together do not exceed t sqrt(B), B being a model's bytes over 25 MiB.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from horovod_topk.core.clipping import local_threshold
from horovod_topk.torch.sparse import refused

_STRETCH = 1 << 16  # elements


def clip_alone(optimizer: Any, clip_norm: float) -> None:
    """Clip before each step where nothing is exchanged: one rank's gradients are all there are.

    Sparse ones as their dense copies would be with `sparse_as_dense`, and else not at all: the step
    is a ConfigError then, as it is with more ranks.
    """
    clip = LocalClip(clip_norm, "sum")

    @torch.no_grad()
    def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        scale = getattr(optimizer, "grad_scale", None)  # of a GradScaler, where the step unscales
        clip.begin(ranks=1, units=1.0 if scale is None else float(scale))
        by_device: dict[torch.device, list[Tensor]] = {}
        for gradient in _values_alone(optimizer, clip_norm):
            by_device.setdefault(gradient.device, []).append(gradient)
        for gradients in by_device.values():
            clip.clip(gradients)

    optimizer.register_step_pre_hook(before_step)


def _values_alone(optimizer: Any, clip_norm: float) -> list[Tensor]:
    """What of all gradients is not zero by its form, to be written to.

    Raises:
        ConfigError: one is sparse, and was not asked to be taken for dense.
    """
    found = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    for p in found:
        if p.grad.is_sparse and not optimizer.sparse_as_dense:
            name = optimizer._parameter_names.get(p, f"of shape {list(p.shape)}")
            raise refused(f"clip_norm={clip_norm}", name)
    for p in found:
        if p.grad.is_sparse:
            p.grad = p.grad.coalesce()  # else the norm is not of sums
    return [p.grad._values() if p.grad.is_sparse else p.grad for p in found]


class LocalClip:
    """Of one optimizer's gradients.

    Args:
        clip_norm: the norm of what is applied.
        reduction: "average" or "sum" over ranks.
    """

    def __init__(self, clip_norm: float, reduction: str) -> None:
        self._clip_norm, self._reduction = clip_norm, reduction
        self._norm: dict[torch.device, float | Tensor] = {}  # so far; tensors on accelerators
        self._threshold = clip_norm

    def begin(self, ranks: int, units: float = 1.0) -> None:
        """A step's first bucket is about to come, its gradients so many times too large."""
        self._norm.clear()
        self._threshold = units * local_threshold(self._clip_norm, self._reduction, ranks)

    def clip(self, gradients: Sequence[Tensor]) -> None:
        """Scale a bucket's gradients in place; what is not finite stays so, and is flagged.

        Waits for no accelerator, so that norms on different devices do not hear of each other:
        there the gradients on each device are clipped to the threshold.
        """
        device = gradients[0].device
        if device.type == "cpu":
            self._clip_on_host(gradients)
            return
        self._clip_on_device(gradients, torch.as_tensor(self._norm.get(device, 0.0), device=device))

    def _clip_on_device(self, gradients: Sequence[Tensor], before: Tensor) -> None:
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients]
        norm = torch.linalg.vector_norm(torch.stack([before.double(), *norms]))
        self._norm[gradients[0].device] = norm
        factor = (self._threshold / norm).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.dtype))

    def _clip_on_host(self, gradients: Sequence[Tensor]) -> None:
        device = gradients[0].device
        before = float(self._norm.get(device, 0.0))
        norm = math.hypot(before, *map(_norm_on_host, gradients))
        self._norm[device] = norm
        if self._threshold < norm < math.inf:
            for gradient in gradients:
                gradient.mul_(self._threshold / norm)


def _norm_on_host(gradient: Tensor) -> float:
    """Euclidean norm: of stretches, as one long sum in float32 loses its third digit.

    Sums in float64 cost many times as much, so that only what overflows otherwise gets them.
    """
    dtype = torch.float64 if gradient.dtype is torch.float64 else torch.float32
    flat: Any = gradient.reshape(-1)
    norms = torch.stack([torch.linalg.vector_norm(s, dtype=dtype) for s in flat.split(_STRETCH)])
    norm = float(torch.linalg.vector_norm(norms, dtype=torch.float64))
    return norm if math.isfinite(norm) else float(gradient.double().norm())
