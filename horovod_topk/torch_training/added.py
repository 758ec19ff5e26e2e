"""What PyTorch's optimizers add to their moments in the step that begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


def applies_nothing(optimizer: Any) -> bool:
    """Whether a fused step applies nothing, as a GradScaler has found infinite gradients."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


def versions(*tensors: Tensor) -> tuple[int, ...]:
    """Return the counters that PyTorch increases when it writes to these tensors in place."""
    return tuple(tensor._version for tensor in tensors)


def added_by(optimizer: Any, group: Mapping[str, Any], parameters: Sequence[Any]) -> list[Tensor]:
    """Gradients as the optimizer adds them to its moments, but for weight decay.

    They are unscaled, if a GradScaler leaves that to a fused step, and negated by `maximize`.
    """
    gradients = [p.grad for p in parameters]
    scale = getattr(optimizer, "grad_scale", None)
    if scale is not None:
        gradients = [gradient / scale for gradient in gradients]
    return [-gradient for gradient in gradients] if group.get("maximize") else gradients
