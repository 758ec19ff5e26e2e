"""Momentum correction beside PyTorch's optimizers: never applied twice, and never not at all.

SGD has none of its own then. Adam and AdamW divide what arrives by the root of its mean square, so
that its scale is of no matter: with betas=(0, b) they take the corrected velocity in the place of
their first moment, and its square in the place of the gradient's.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from torch.optim import SGD, Adam, AdamW

from horovod_topk.core.momentum_takeover import (
    Own,
    Words,
    check_once,
    none_to_correct,
    settings_of,
)
from horovod_topk.core.momentum_takeover import advise as advise_of
from horovod_topk.errors import ConfigError

log = logging.getLogger("horovod_topk")

WORDS = Words("torch.optim.SGD, Adam or AdamW", "momentum=0.9 or betas=(0.9, 0.999)")
TAKEN = "topkef_momentum"  # in a parameter group, and so in checkpoints: what was taken over


def check_not_twice(optimizer: Any, momentum: float, *, nesterov: bool = False) -> None:
    """Refuse an optimizer that would apply a momentum of its own to corrected gradients.

    Raises:
        ConfigError: it has one, or is not one whose momentum can be corrected.
    """
    if not momentum:
        return
    kind, is_adam = type(optimizer).__name__, isinstance(optimizer, (Adam, AdamW))
    for number, group in enumerate(optimizer.param_groups):
        if not is_adam and "momentum" not in group:
            raise none_to_correct(momentum, kind, WORDS.known)
        setting = "betas" if is_adam else "momentum"
        own = Own(
            kind,
            where=f"parameter group {number} of the optimizer",
            setting=setting,
            shown=group[setting],
            applies=bool(group["betas"][0] if is_adam else group["momentum"]),
            off=_off(group),
            normalises=is_adam,
            besides="; a scheduler that sets it needs cycle_momentum=False",
        )
        check_once(momentum, nesterov, own)


def own_momentum(optimizer: Any) -> dict[str, Any]:
    """The settings that stand for the optimizer's momentum.

    Raises:
        ConfigError: it has none that could be corrected, or not the same in all parameter groups.
    """
    kind, is_known = type(optimizer).__name__, isinstance(optimizer, (SGD, Adam, AdamW))
    found = [_own(group) for group in optimizer.param_groups]
    if is_known and None not in found and len(set(found)) > 1:
        raise ConfigError(
            f"momentum='optimizer' was given, and parameter groups have {found}",
            cure="Give all parameter groups the same momentum, without dampening",
        )
    return settings_of(kind, found[0] if is_known and None not in found else None, WORDS)


def take_over(optimizer: Any, momentum: float) -> None:
    """Take it off the optimizer: at first, and where it has loaded what it was without us."""
    for group in optimizer.param_groups:
        own = _own(group)
        if own is not None and own[0] == momentum:
            if _now(group):
                _note_velocities(optimizer, group)
            group[TAKEN] = (momentum, float(own[1]))
            _set(group, 0.0, nesterov=False)


def give_back(optimizer: Any, momentum: float = 0.0, *, nesterov: bool = False) -> None:
    """Let the optimizer have what was taken over, or set off, where nobody corrects it.

    Args:
        optimizer: maybe with the parameter groups of a checkpoint of a run that was compressed.
        momentum: of the settings, if it is a number; nesterov: of these.
    """
    for group in optimizer.param_groups:
        taken = (momentum, float(nesterov)) if momentum else group.get(TAKEN)
        if taken and not _now(group):
            _set(group, taken[0], nesterov=bool(taken[1]))
            log.info("TopKEF leaves momentum=%s to %s", taken[0], type(optimizer).__name__)


def _note_velocities(optimizer: Any, group: Any) -> None:
    """Say so where momentum has built up that goes no further."""
    kept = (key for p in group["params"] for key in optimizer.state.get(p, {}))
    if {"momentum_buffer", "exp_avg"} & set(kept):
        log.warning(
            "TopKEF takes the momentum of %s over, and starts at zero instead of from its buffers",
            type(optimizer).__name__,
        )


def _own(group: Any) -> tuple[float, bool] | None:
    """A parameter group's momentum, or what was taken over; whether it is Nesterov's.

    Returns:
        None, if it is of another kind.
    """
    if "betas" not in group and ("momentum" not in group or group.get("dampening")):
        return None
    if not _now(group) and TAKEN in group:
        momentum, nesterov = group[TAKEN]
        return float(momentum), bool(nesterov)
    return _now(group), bool(group.get("nesterov", False))


def _now(group: Any) -> float:
    """What the optimizer itself applies."""
    return float(group["betas"][0] if "betas" in group else group.get("momentum", 0.0))


def _set(group: Any, momentum: float, *, nesterov: bool) -> None:
    if "betas" in group:
        group["betas"] = (momentum, group["betas"][1])
    else:
        group["momentum"], group["nesterov"] = momentum, nesterov


def hand_over(optimizer: Any, momentum: float, *, nesterov: bool) -> None:
    """Let the optimizer apply it where nothing is compressed.

    For SGD that is the same without sparsity. Adam averages gradients before it squares them and
    not after: it is what a user of one process has.

    Raises:
        ConfigError: as `check_not_twice`.
    """
    check_not_twice(optimizer, momentum, nesterov=nesterov)
    give = partial(give_back, momentum=momentum, nesterov=nesterov)
    give(optimizer)
    optimizer.register_step_pre_hook(lambda it, *_: give(it))  # it may load what it was with us
    if momentum:
        name = type(optimizer).__name__
        log.warning("TopKEF compresses nothing, and leaves momentum=%s to %s", momentum, name)


def advise(optimizer: Any, momentum: float) -> None:
    """Warn of an Adam whose own momentum is not corrected."""
    if momentum or not isinstance(optimizer, (Adam, AdamW)):
        return
    if any(group["betas"][0] for group in optimizer.param_groups):
        advise_of(type(optimizer).__name__)


def _off(group: Any) -> str:
    return f"betas=(0, {group['betas'][1]})" if "betas" in group else "momentum=0"
