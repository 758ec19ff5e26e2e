"""Loss scaling: gradients come multiplied by a scaler's factor, residuals are kept without it.

With `torch.amp.GradScaler` every gradient is multiplied by a scale S that changes (Micikevicius et
al. 2018, Mixed Precision Training). So that residuals do not depend on S,

    compensate   a = e + g / S
    decode       g' = S * scale * sum over ranks of decode(p_r)

and the scaler divides g' by S, as it does without compression. Both operations are exact where S
is a power of two, as by default, and nothing under- or overflows. An overflow on any rank sets a
flag on every rank: all scalers skip the step, and no residual changes.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from horovod_topk.core.plan.buckets import Plan
from horovod_topk.errors import ConfigError, GradientChangedError, UnsupportedDtypeError

log = logging.getLogger("horovod_topk")

_SCALER_FILE = "grad_scaler.py"  # PyTorch's, in every release
_DEPTH = 12  # most frames between GradScaler.step() and a hook of the optimizer's step


class Scaler(Protocol):
    """The methods of `torch.amp.GradScaler` that this package calls."""

    def get_scale(self) -> float:
        """The present scale. Waits for the device."""
        ...

    def is_enabled(self) -> bool:
        """Whether the scaler scales losses at all."""
        ...


def _is_scaler(kind: type) -> bool:
    """Whether a class is a GradScaler, in whatever module PyTorch defines it."""
    return all(hasattr(kind, each) for each in ("get_scale", "is_enabled", "unscale_"))


def check_scaler(scaler: object) -> None:
    """Refuse an object that is not a GradScaler.

    Raises:
        ConfigError: methods of a GradScaler are missing.
    """
    if scaler is None or all(hasattr(scaler, each) for each in ("get_scale", "is_enabled")):
        return
    raise ConfigError(
        f"grad_scaler={scaler!r} is no gradient scaler",
        cure="Pass the torch.amp.GradScaler that scales the loss, or None",
    )


def warn_of_scaler(kind: str) -> tuple[str, ...]:
    """Warn if PyTorch's GradScaler calls the present step and TopKEF was not given it.

    Only frames of PyTorch's own file are inspected: reading a frame's locals keeps them alive as
    long as the frame runs.

    Args:
        kind: name of the optimizer's class.

    Returns:
        The warning, if there is one.
    """
    scaler = _calling_scaler()
    if scaler is None or not scaler.is_enabled():
        return ()
    text = (
        f"a GradScaler that TopKEF does not know steps {kind}: residuals and velocities are in "
        f"units of its scale, {scaler.get_scale():g} now, and count too much or too little for "
        "some steps after each change of it. Pass TopKEF(grad_scaler=scaler)"
    )
    log.warning("%s", text)
    return (text,)


def _calling_scaler() -> Any:
    """The GradScaler whose `step()` calls this function; None if there is none."""
    frame = inspect.currentframe()
    for _ in range(_DEPTH):
        if frame is None:
            return None
        if Path(frame.f_code.co_filename).name == _SCALER_FILE:
            caller = frame.f_locals.get("self")
            if _is_scaler(type(caller)):
                return caller
        frame = frame.f_back
    return None


def check_dtypes(plan: Plan) -> None:
    """Refuse gradients that a GradScaler cannot unscale.

    Raises:
        UnsupportedDtypeError: a gradient is float16, and may underflow when it is unscaled.
    """
    for tensor in plan.tensors():
        if tensor.spec.dtype == "float16":
            raise UnsupportedDtypeError(
                "grad_scaler= was given, and float16 gradients cannot be unscaled",
                tensor=tensor.spec.name,
                cure="Keep parameters in float32 and use torch.autocast, as GradScaler demands",
            )


@dataclass(frozen=True)
class Scale:
    """The loss scale at the time when the first bucket of a step was sent."""

    value: float | Tensor  # a tensor on an accelerator; only `number` waits for it

    def divide(self, gradients: Sequence[Tensor]) -> None:
        """Divide gradients by the scale, in place."""
        if isinstance(self.value, float):
            if self.value != 1.0:
                for gradient in gradients:
                    gradient.mul_(1.0 / self.value)
            return
        for gradient in gradients:
            gradient.mul_(self.value.double().reciprocal().to(gradient))

    @cached_property
    def number(self) -> float:
        """The scale as a float. Waits for the device, as decoding does right after."""
        return self.value if isinstance(self.value, float) else float(self.value)


ONE = Scale(1.0)


class LossScale:
    """Reads the scale of a GradScaler for the exchange of one optimizer's gradients."""

    def __init__(self, scaler: Scaler) -> None:
        self._scaler: Any = scaler

    def now(self) -> Scale:
        """The present scale, read without waiting for an accelerator.

        Raises:
            ConfigError: the scale is on the host, and zero or not finite.
        """
        if not self._scaler.is_enabled():
            return ONE
        scale = getattr(self._scaler, "_scale", None)
        if isinstance(scale, Tensor) and scale.device.type != "cpu":
            return Scale(scale.clone())  # update() writes it in place
        number = float(self._scaler.get_scale())
        if not 0.0 < number < math.inf:
            raise ConfigError(
                f"the GradScaler's scale is {number}, by which no gradient can be divided",
                cure="Look for what makes every step overflow, and start a new GradScaler",
            )
        return Scale(number)

    def check_not_unscaled(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse gradients that the scaler has unscaled before they were exchanged.

        Unscaling, also by `step()`, does not change a tensor's version, so the scaler is asked.

        Raises:
            GradientChangedError: the scaler has unscaled them.
        """
        states: Any = getattr(self._scaler, "_per_optimizer_states", {})
        stage = states[id(optimizer)]["stage"] if id(optimizer) in states else None
        if getattr(stage, "name", "") == "UNSCALED":
            raise GradientChangedError(
                "GradScaler unscaled the gradients before they were exchanged",
                cure="Call optimizer.synchronize() after backward(), and then scaler.step() inside "
                "optimizer.skip_synchronize()",
            )
