"""Numbers in an optimizer's parameter groups, and what is no number there.

PyTorch asks nothing of these settings: `lr` is None in Adafactor of Transformers, a list or a
function in others, and `betas` has one to three numbers, or none. A setting that is no number is
not read, and does not stand for 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

from horovod_topk.core.run.optimizers import kind_of
from horovod_topk.errors import ConfigError


def number_of(value: object) -> float | None:
    """Return a setting as a float; None: it is no number.

    Numbers of NumPy, tensors and arrays of one element are numbers. Reading a tensor on an
    accelerator waits for the device.
    """
    if not isinstance(value, Real) and hasattr(value, "item"):
        try:
            value = value.item()
        except (TypeError, ValueError, RuntimeError):  # several elements, or none
            return None
    return float(value) if isinstance(value, Real) else None


def betas_of(group: Mapping[str, Any]) -> list[float | None]:
    """Return `betas` of a parameter group one by one, with None for what is no number."""
    betas = group.get("betas")
    if isinstance(betas, str) or not isinstance(betas, Iterable):
        return [number_of(betas)]
    try:
        return [number_of(beta) for beta in betas]
    except TypeError:  # a tensor without dimensions
        return [number_of(betas)]


def momentum_of(group: Mapping[str, Any]) -> float | None:
    """Return the momentum of a parameter group, or the first of `betas`.

    Returns:
        The number; 0: it has neither, or None; None: it is no number.
    """
    if "betas" in group:
        return 0.0 if group["betas"] is None else next(iter(betas_of(group)), 0.0)
    momentum = group.get("momentum")
    return 0.0 if momentum is None else number_of(momentum)


def number_in(optimizer: Any, group: Mapping[str, Any], setting: str) -> float:
    """Return a setting of a parameter group as a float.

    Raises:
        ConfigError: it is no number.
    """
    number = number_of(group[setting])
    if number is None:
        raise not_a_number(optimizer, group, setting)
    return number


def not_a_number(optimizer: Any, group: Mapping[str, Any], setting: str) -> ConfigError:
    """The error for a setting of a parameter group that has to be a number and is none."""
    return ConfigError(
        f"a parameter group of {kind_of(optimizer)} has {setting}={group[setting]!r:.60}, "
        "and a step on compressed gradients needs a number",
        cure=f"Set {setting} to a number before the step",
    )
