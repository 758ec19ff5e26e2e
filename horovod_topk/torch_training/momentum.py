"""Settings that depend on PyTorch's optimizers, and their momentum, which is applied exactly once.

With a number for `momentum`, SGD has no momentum of its own, and computes p -= lr * v with the
corrected velocity v. Adam and AdamW divide by the root of a mean square, so that the scale of v
does not matter: with betas=(0, b) they use v instead of their first moment, and the square of v
instead of that of the gradient.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW

from horovod_topk.core.run.optimizers import (
    HAS_NONE,
    Own,
    check_once,
    fitted,
    kind_of,
    none_to_correct,
    note_followed,
    why_not_by_arrivals,
)
from horovod_topk.core.run.optimizers import advise as advise_of
from horovod_topk.errors import ConfigError
from horovod_topk.methods.protocol import Method
from horovod_topk.torch_training.group_settings import betas_of, momentum_of, number_of
from horovod_topk.torch_training.tracing import untraced
from horovod_topk.updates import tracker
from horovod_topk.updates.tracker import Rule

log = logging.getLogger("horovod_topk")

KNOWN = "torch.optim.SGD, Adam or AdamW"
TAKEN = "topkef_momentum"  # in parameter groups of older checkpoints, which have a momentum of 0


def check_not_twice(optimizer: Any, momentum: float, *, nesterov: bool = False) -> None:
    """Refuse an optimizer that would apply a momentum of its own to corrected gradients.

    Raises:
        ConfigError: the optimizer has a momentum, or is of a kind that cannot be corrected.
    """
    if not momentum:
        return
    kind, is_adam = kind_of(optimizer), isinstance(optimizer, (Adam, AdamW))
    for number, group in enumerate(optimizer.param_groups):
        if not is_adam and "momentum" not in group:
            raise none_to_correct(momentum, kind, KNOWN)
        setting = "betas" if is_adam else "momentum"
        own = Own(
            kind,
            where=f"parameter group {number} of the optimizer",
            setting=setting,
            shown=group[setting],
            applies=momentum_of(group) != 0.0,
            off=_off(group),
            normalises=is_adam,
            besides="; a scheduler that sets it needs cycle_momentum=False",
        )
        check_once(momentum, nesterov, own)


def fit_momentum(
    optimizer: Any, config: Method, deferred: Mapping[str, str]
) -> tuple[Method, Rule | None]:
    """Fill in the settings that depend on the optimizer, and on how its steps are adapted.

    Args:
        optimizer: the optimizer of the gradients.
        config: the settings.
        deferred: names of the settings that are left to the compressor.

    Returns:
        The settings, and the rule by which its steps are adapted; None: they are not.

    Raises:
        ConfigError: momentum would be applied twice, or weights would become NaN.
    """
    _check_eps(optimizer, config)
    is_adam, kind = isinstance(optimizer, (Adam, AdamW)), kind_of(optimizer)
    normalises = is_adam if is_adam or isinstance(optimizer, SGD) else None
    is_auto = "momentum" in deferred
    if is_auto:
        give_back(optimizer)
    why = _why_left(optimizer, config) if is_auto else ""
    follows = is_auto and not why
    config = fitted(config, deferred, normalises=normalises, follows=follows)
    if why:
        log.info("TopKEF leaves momentum to %s: %s", kind, why)
    elif not follows:
        check_not_twice(optimizer, config.momentum, nesterov=config.nesterov)
    else:
        note_followed(kind)
    return config, (tracker.ADAM if is_adam else tracker.SGD) if follows else None


def _check_eps(optimizer: Any, config: Method) -> None:
    """Refuse an Adam that divides by 0 where no gradient has arrived yet."""
    if not isinstance(optimizer, (Adam, AdamW)) or (config.ratio == 1.0 and not config.withheld()):
        return
    for group in optimizer.param_groups:
        # Its fused steps compute in float32 at least.
        kinds = {torch.float32 if group.get("fused") else p.dtype for p in group["params"]}
        for kind in kinds:
            if kind.is_floating_point and not torch.tensor(group["eps"], dtype=kind):
                raise ConfigError(
                    f"{kind_of(optimizer)} has eps={group['eps']}, which is 0 in {kind}: weights "
                    "whose gradients have not arrived yet would become 0 / 0",
                    cure="Pass a larger eps, such as 1e-8, or 1e-7 for float16",
                )


def _why_left(optimizer: Any, config: Method) -> str:
    """Reason why momentum="auto" leaves this optimizer's steps as they are; empty: none."""
    groups = optimizer.param_groups
    if not isinstance(optimizer, (SGD, Adam, AdamW)):
        return f"it is none of {KNOWN}"
    if not _steps_as_known(optimizer):
        return f"its step() is not that of {KNOWN}"
    if any(group.get("differentiable") for group in groups):
        return "it is differentiable"
    if not all(map(_has_numbers, groups)):
        return f"its parameter groups have {_shown(groups[0])}"
    if any(group.get("dampening") for group in groups):
        return "it is dampened"
    if not any(map(_now, groups)):
        return HAS_NONE
    wide = torch.float32, torch.float64
    parameters = (p for group in groups for p in group["params"] if p.requires_grad)
    narrow = {str(p.dtype) for p in parameters if p.dtype not in wide}
    if narrow:
        return f"gradients are {', '.join(sorted(narrow))}"
    return why_not_by_arrivals(config)


def _steps_as_known(optimizer: Any) -> bool:
    """Whether an optimizer has the `step` of SGD, Adam or AdamW, below Horovod's own `step`."""
    found = (vars(cls)["step"] for cls in type(optimizer).__mro__ if "step" in vars(cls))
    steps = (inspect.unwrap(step) for step in found)
    own = next(step for step in steps if not step.__module__.startswith("horovod."))
    known: list[Any] = [SGD, Adam, AdamW]
    return own in [inspect.unwrap(each.step) for each in known]


def give_back(optimizer: Any, momentum: float = 0.0, *, nesterov: bool = False) -> None:
    """Restore an optimizer's momentum that was set to 0 for momentum correction.

    Args:
        optimizer: its parameter groups may come from a checkpoint of an older version, which has
            set the momentum to 0.
        momentum: the momentum of the settings, if it is a number.
        nesterov: whether that momentum is Nesterov's.
    """
    for group in optimizer.param_groups:
        before, (own, own_nesterov) = _now(group), group.pop(TAKEN, (momentum, nesterov))
        if own and not before:
            _set(group, float(own), nesterov=bool(own_nesterov))
            log.info("TopKEF leaves momentum=%s to %s", own, kind_of(optimizer))


def _now(group: Any) -> float:
    """The momentum that the optimizer itself applies; 0 if it is no number."""
    return momentum_of(group) or 0.0


def _has_numbers(group: Any) -> bool:
    """Whether the settings of an SGD, Adam or AdamW that an adapted step reads are numbers."""
    if "betas" in group:
        return len(betas := betas_of(group)) == 2 and None not in betas
    return None not in (momentum_of(group), number_of(group["dampening"]))


def _shown(group: Any) -> str:
    keys = [key for key in ("betas", "momentum", "dampening") if key in group]
    return ", ".join(f"{key}={group[key]}" for key in keys) or "none"


def _set(group: Any, momentum: float, *, nesterov: bool) -> None:
    if "betas" in group:
        group["betas"] = (momentum, group["betas"][1])
    else:
        group["momentum"], group["nesterov"] = momentum, nesterov


def hand_over(optimizer: Any, momentum: float, *, nesterov: bool) -> Any:
    """Let the optimizer apply the momentum itself, if nothing is compressed.

    For SGD the result is the same. Adam's second moment then has squares of gradients, not of
    velocities, as in training with a single process.

    Returns:
        The handle of a hook that was registered with the optimizer.

    Raises:
        ConfigError: as `check_not_twice`.
    """
    check_not_twice(optimizer, momentum, nesterov=nesterov)
    give = partial(give_back, momentum=momentum, nesterov=nesterov)
    give(optimizer)
    if momentum:
        name = kind_of(optimizer)
        log.warning("TopKEF compresses nothing, and leaves momentum=%s to %s", momentum, name)
    # A checkpoint may set it to 0.
    return optimizer.register_step_pre_hook(untraced(lambda it, *_: give(it)))


def advise(optimizer: Any, config: Method, *, is_auto: bool) -> tuple[str, ...]:
    """Warn about an optimizer whose steps do not take into account that gradients arrive late.

    is_auto: whether `momentum` is left to the compressor.

    Returns:
        The warnings that were given: one or none.
    """
    has_beta1 = any(_now(group) for group in optimizer.param_groups if "betas" in group)
    normalises = isinstance(optimizer, (Adam, AdamW)) and has_beta1
    why = _why_left(optimizer, config) if is_auto else ""
    return advise_of(kind_of(optimizer), config, why, normalises=normalises)


def _off(group: Any) -> str:
    return f"betas=(0, {group['betas'][1]})" if "betas" in group else "momentum=0"
