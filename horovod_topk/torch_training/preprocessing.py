"""Gradient preprocessing: a bucket's local gradients are unscaled and clipped before compression.

Each bucket is preprocessed in place when it is complete, so that buckets are still sent while
backward goes on. Without settings that need preprocessing there is no `Preprocessing`.

With `torch.amp.GradScaler` every gradient is multiplied by a scale S that changes (Micikevicius et
al. 2018, Mixed Precision Training). So that residuals do not depend on S,

    compensate   a = e + g / S
    decode       g' = S * scale * sum over ranks of decode(p_r)

and the scaler divides g' by S, as it does without compression. Both operations are exact where S
is a power of two, as by default, and nothing under- or overflows. An overflow on any rank sets a
flag on every rank: all scalers skip the step, and no residual changes.

`core.codec.clipping` gives the threshold for clipping, and the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from horovod_topk.core.codec.clipping import LocalClip
from horovod_topk.core.plan.buckets import Plan
from horovod_topk.errors import ConfigError, GradientChangedError, UnsupportedDtypeError
from horovod_topk.torch_training.gradients import local
from horovod_topk.torch_training.onebit_adam import OneBitAdam
from horovod_topk.torch_training.tracing import untraced

STRETCH = 1 << 16  # elements of a stretch that is summed in float32
LOOKS = 8  # first exchanges after which it is looked whether a GradScaler divides gradients
UNSCALED = 1024.0  # what clipping divides by is less


class Preprocessing:
    """Unscales, clips and converts one optimizer's gradients before they are compressed.

    Args:
        own: the optimizer, if ranks exchange its momentum instead of gradients.
    """

    def __init__(
        self, scaler: Any, clip: LocalClip[Tensor] | None, own: OneBitAdam | None = None
    ) -> None:
        self._scaler, self._clip, self._own = scaler, clip, own
        self._scale: float | Tensor = 1.0

    @classmethod
    def of(cls, scaler: Any, plan: Plan, optimizer: Any) -> Preprocessing | None:
        """The preprocessing that settings and optimizer need; None: none."""
        norm = plan.config.clip_norm
        own = optimizer if isinstance(optimizer, OneBitAdam) else None
        if scaler is None and norm is None and own is None:
            return None
        for tensor in plan.tensors():
            if scaler is not None and tensor.spec.dtype == "float16":
                raise UnsupportedDtypeError(
                    "grad_scaler= was given, and float16 gradients cannot be unscaled",
                    tensor=tensor.spec.name,
                    cure="Keep parameters in float32 and use torch.autocast, as GradScaler demands",
                )
        return cls(scaler, None if norm is None else local_clip(norm, plan.reduction), own)

    def begin(self, optimizer: Any, ranks: int, committed: int, ratio: float) -> None:
        """Note loss scale and clipping threshold of a step, before its first bucket."""
        self._check_not_unscaled(optimizer)
        self._scale = scale_of(self._scaler)
        if self._clip is not None:
            self._clip.begin(ranks)
        if self._own is not None:
            self._own.begin_exchange(committed, ratio)

    def apply(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Unscale a bucket's gradients and clip them, in place.

        Then have the optimizer turn them into what it exchanges.
        """
        unscale(gradients, self._scale)
        if self._clip is not None:
            self._clip.clip(gradients)
        if self._own is not None:
            self._own.before_exchange(parameters, gradients)

    def gain(self, optimizer: Any) -> float:
        """The factor that exchanged gradients are multiplied by."""
        self._check_not_unscaled(optimizer)
        return float(self._scale)

    def _check_not_unscaled(self, optimizer: Any) -> None:
        """Refuse gradients that the scaler has unscaled before they were exchanged.

        Unscaling, also by `step()`, does not change a tensor's version, so the scaler is asked.
        """
        states: Any = getattr(self._scaler, "_per_optimizer_states", {})
        stage = states[id(optimizer)]["stage"] if id(optimizer) in states else None
        if getattr(stage, "name", "") == "UNSCALED":
            raise GradientChangedError(
                "GradScaler unscaled the gradients before they were exchanged",
                cure="Call optimizer.synchronize() after backward(), and then scaler.step() inside "
                "optimizer.skip_synchronize()",
            )


# Loss scaling.


def check_scaler(scaler: object) -> None:
    """Refuse an object that is not a GradScaler."""
    is_one = all(hasattr(scaler, each) for each in ("get_scale", "is_enabled"))
    if scaler is None or (is_one and not isinstance(scaler, type)):
        return
    raise ConfigError(
        f"grad_scaler={scaler!r} is no gradient scaler",
        cure="Pass the torch.amp.GradScaler that scales the loss, or None",
    )


def scale_of(scaler: Any) -> float | Tensor:
    """Return the present scale of a GradScaler, or 1, without waiting for an accelerator."""
    if scaler is None or not scaler.is_enabled():
        return 1.0
    scale = getattr(scaler, "_scale", None)
    if isinstance(scale, Tensor) and scale.device.type != "cpu":
        return scale.clone()  # update() writes it in place
    number = float(scaler.get_scale())
    if not 0.0 < number < math.inf:
        raise ConfigError(
            f"the GradScaler's scale is {number}, by which no gradient can be divided",
            cure="Look for what makes every step overflow, and start a new GradScaler",
        )
    return number


def unscale(gradients: Sequence[Tensor], scale: float | Tensor) -> None:
    """Divide gradients by a loss scale, in place."""
    if isinstance(scale, Tensor):
        for gradient in gradients:
            gradient.mul_(scale.double().reciprocal().to(gradient))
    elif scale != 1.0:
        for gradient in gradients:
            gradient.mul_(1.0 / scale)


class UnknownScaler:
    """Notices that gradients are divided between exchange and step, as a GradScaler does.

    It looks at the largest element of one gradient, after the first exchanges only.
    """

    def __init__(self) -> None:
        self.looks = LOOKS
        self._seen: tuple[Tensor, int, float, int] | None = None

    def note(self, gradients: Iterable[Tensor | None]) -> None:
        """Note the gradients that were exchanged. Waits for the device."""
        self._seen, self.looks = None, self.looks - 1
        for gradient in gradients:
            if gradient is not None and not gradient.is_sparse and local(gradient).numel():
                elements = local(gradient).reshape(-1)
                at = int(elements.abs().argmax())
                value = float(elements[at])
                if value and math.isfinite(value):
                    self._seen = gradient, at, value, gradient._version
                    return

    def divisor(self, optimizer: Any) -> float:
        """Return the scale that a step's gradients were divided by, or 1 without a scaler."""
        seen, self._seen = self._seen, None
        if seen is None:
            return 1.0
        if (scale := getattr(optimizer, "grad_scale", None)) is not None:  # a fused step divides
            return float(scale)
        gradient, at, before, version = seen
        now = float(local(gradient).detach().reshape(-1)[at])  # it may be of a graph
        divisor = before / now if now else 1.0
        if gradient._version != version:  # clipping writes, perhaps after a scaler
            return divisor if UNSCALED <= divisor < math.inf else 1.0
        return divisor if math.frexp(divisor)[0] == 0.5 else 1.0  # a scale is a power of 2


# Clipping.


def clip_alone(
    optimizer: Any, clip_norm: float, gradients: Callable[[], Sequence[Tensor]] | None = None
) -> Any:
    """Clip gradients before each step where nothing is exchanged; return the handle of the hook.

    gradients: returns the gradients of a step, clipped in place; None: the `grad` of every
        parameter.
    """
    clip = local_clip(clip_norm, "sum")

    @torch.no_grad()
    def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        scale = getattr(optimizer, "grad_scale", None)  # set by GradScaler if the step unscales
        clip.begin(ranks=1, units=1.0 if scale is None else float(scale))
        by_device: dict[torch.device, list[Tensor]] = {}
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        own = (p.grad for p in parameters if p.grad is not None)
        for gradient in own if gradients is None else gradients():
            by_device.setdefault(gradient.device, []).append(gradient)
        for each in by_device.values():
            clip.clip(each)

    return optimizer.register_step_pre_hook(untraced(before_step))


def local_clip(clip_norm: float, reduction: str) -> LocalClip[Tensor]:
    """Make the clipper of a rank's gradients, bucket by bucket as they become ready."""
    return LocalClip(clip_norm, reduction, TorchNorms(), by_bucket=True)


class TorchNorms:
    """`core.codec.clipping.GradientNorms`: floats for host gradients, tensors on accelerators.

    To avoid waiting for accelerators, the gradients on each device are clipped by their own norm.
    """

    def device(self, gradients: Sequence[Tensor]) -> object:
        """`GradientNorms.device`: the device."""
        return gradients[0].device

    def norm(self, gradients: Sequence[Tensor], before: float | Tensor) -> float | Tensor:
        """`GradientNorms.norm`."""
        if gradients[0].device.type == "cpu" and not isinstance(before, Tensor):
            return math.hypot(before, *map(_norm_on_host, gradients))
        earlier = torch.as_tensor(before, device=gradients[0].device).double()
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients]
        norm: Tensor = torch.linalg.vector_norm(torch.stack([earlier, *norms]))
        return norm

    def reduce(self, gradients: Sequence[Tensor], threshold: float, norm: float | Tensor) -> None:
        """`GradientNorms.reduce`."""
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
    norms = torch.stack([torch.linalg.vector_norm(s, dtype=dtype) for s in flat.split(STRETCH)])
    norm = float(torch.linalg.vector_norm(norms, dtype=torch.float64))
    return norm if math.isfinite(norm) else float(gradient.double().norm())
