"""Momentum correction beside PyTorch's optimizers: never applied twice, and never not at all.

SGD has no momentum of its own while it steps, and takes p -= lr * v with the corrected velocity v.
Adam and AdamW divide what arrives by the root of its mean square, so that its scale is of no
matter: with betas=(0, b) they take the velocity in the place of their first moment, and its square
in the place of the gradient's.

A momentum that is taken over is lent for the step alone: parameter groups are as the user, or a
scheduler, has set them whenever anybody else looks. Gradients hold (1 - m) v between exchange and
step, and SGD's learning rate is divided by 1 - m during the step.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW

from horovod_topk.config import AUTO
from horovod_topk.core.guard import Watch
from horovod_topk.core.momentum import Momentum
from horovod_topk.core.momentum_takeover import (
    Own,
    Words,
    check_once,
    fitted,
    none_to_correct,
    not_a_momentum,
    settings_of,
    warn_of_loaded,
    why_not_corrected,
)
from horovod_topk.core.momentum_takeover import advise as advise_of
from horovod_topk.methods.protocol import Method
from horovod_topk.torch_training.momentum_saved import TAKEN, drop_loaded, save_zeros

log = logging.getLogger("horovod_topk")

WORDS = Words("torch.optim.SGD, Adam or AdamW", "momentum=0.9 or betas=(0.9, 0.999)")
KNOWN = SGD, Adam, AdamW


class Loan:
    """An optimizer's own momentum, which it does without while it steps.

    Args:
        optimizer: SGD, Adam or AdamW.
        names: of parameters; those without one are not compressed.

    Attributes:
        warnings: what was warned of.
    """

    def __init__(self, optimizer: Any, names: Mapping[Any, str]) -> None:
        self._optimizer = weakref.ref(optimizer)  # which holds the hooks, and so this
        self._names = names
        self._met: list[Any] = []  # parameter groups; another one has been loaded, or added
        self._factors: list[float] = []  # by parameter group, of gradients exchanged last
        self._lent: list[dict[str, Any]] | None = None  # by parameter group, while it steps
        self.warnings: tuple[str, ...] = ()
        self._guard = Watch(None)
        # Of the step that is under way, or was last: whether it was exchanged without a momentum,
        # as in training without compression; and whether the mean velocities were exchanged.
        self._is_over, self._hands_over = False, False
        save_zeros(optimizer, self)

    def lends_for(self, guard: Watch) -> None:
        """Hand the momentum back when a guard ends compression."""
        self._guard, guard.hands_over = guard, True

    @property
    def is_over(self) -> bool:
        """Whether the optimizer has its momentum back."""
        return not self._guard.corrects

    def groups(self, optimizer: Any) -> list[Any]:
        """The parameter groups as the user knows them, also while the optimizer steps."""
        lent = self._lent or []
        added: list[dict[str, Any]] = [{}] * (len(optimizer.param_groups) - len(lent))
        pairs = zip(optimizer.param_groups, lent + added, strict=False)
        return [{**group, **own} for group, own in pairs]

    def is_met(self, group: Any) -> bool:
        """Whether a parameter group has been stepped on, or exchanged for."""
        return any(group is each for each in self._met)

    def now(self) -> dict[str, Momentum]:
        """The momentum of each parameter, by name, of a step that begins now; none if it is over.

        Raises:
            ConfigError: a parameter group has none that can be corrected any more.
        """
        optimizer: Any = self._optimizer()
        was_over, self._is_over = self._is_over, self.is_over
        self._hands_over = self._guard.is_handing_over
        if self._is_over:
            return {}
        if was_over:  # what the optimizer has gathered goes on as our velocities
            self._met = list(optimizer.param_groups)
        self._meet(optimizer)
        found, factors, names = dict[str, Momentum](), list[float](), self._names
        for number, group in enumerate(self.groups(optimizer)):
            own = _own(group)
            if own is None or not 0.0 <= own[0] < 1.0:
                where = f"parameter group {number} of {type(optimizer).__name__}"
                raise not_a_momentum(where, _shown(group))
            found |= {names[p]: Momentum(*own) for p in group["params"] if p in names}
            factors.append(own[0])
        self._factors = factors
        return found

    def lend(self, optimizer: Any) -> None:
        """Take the momentum off the optimizer, which applies gradients next.

        They were exchanged with the momentum of that time, which may have been moved since.
        """
        if self._lent is not None or self._is_over:
            return
        self._meet(optimizer)
        self._lent, factors = [], self._factors
        if self._hands_over:
            _drop_buffers(optimizer)
        for number, group in enumerate(optimizer.param_groups):
            if "betas" in group:
                self._lent.append({"betas": group["betas"]})
                group["betas"] = (0.0 * group["betas"][0], group["betas"][1])
            else:
                factor = factors[number] if number < len(factors) else _now(group)
                self._lent.append({key: group[key] for key in ("momentum", "nesterov", "lr")})
                # With a momentum, and nothing gathered, SGD keeps what it applies in a buffer.
                momentum = factor if self._hands_over else 0.0
                group.update(momentum=momentum, nesterov=False, lr=group["lr"] / (1.0 - factor))

    def take_back(self, optimizer: Any) -> None:
        """Give the parameter groups what they had.

        If the mean velocities have been exchanged, the optimizer has them now: Adam keeps 1 - m
        times a velocity, which is what it was given, and SGD the velocity.
        """
        if self._lent is not None and self._hands_over:
            for group, factor in zip(optimizer.param_groups, self._factors, strict=False):
                for buffer in () if "betas" in group else _buffers(optimizer, group):
                    buffer.div_(1.0 - factor)
        for group, lent in zip(optimizer.param_groups, self._lent or (), strict=False):
            group.update(lent)
        self._lent = None

    def velocities(self) -> dict[str, Tensor]:
        """What the optimizer has gathered since it has its momentum back, flat, by name."""
        optimizer: Any = self._optimizer()
        found = dict[str, Tensor]()
        for group in optimizer.param_groups:
            is_adam = "betas" in group
            factor = 1.0 / (1.0 - group["betas"][0]) if is_adam else 1.0
            if group.get("maximize") and not is_adam:
                factor = -factor
            for p in group["params"]:
                buffer = optimizer.state.get(p, {}).get("exp_avg" if is_adam else "momentum_buffer")
                if p in self._names and buffer is not None:
                    found[self._names[p]] = (factor * buffer).reshape(-1)
        return found

    def _meet(self, optimizer: Any) -> None:
        """Look at parameter groups that are new: a checkpoint may have brought them."""
        if all(map(self.is_met, optimizer.param_groups)):
            return
        gathered = False
        for group in optimizer.param_groups:
            if not self.is_met(group):
                is_ours = TAKEN in group
                _restore(group)
                gathered |= drop_loaded(optimizer, group) and not is_ours
        self._met = list(optimizer.param_groups)
        if gathered:
            self.warnings = (warn_of_loaded(type(optimizer).__name__),)


def _buffers(optimizer: Any, group: Any) -> list[Tensor]:
    """Where SGD keeps the momentum of a parameter group."""
    states = (optimizer.state.get(p, {}) for p in group["params"])
    found = (own.get("momentum_buffer") for own in states)
    return [buffer for buffer in found if buffer is not None]


def _drop_buffers(optimizer: Any) -> None:
    """Have SGD begin with no momentum."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p in optimizer.state:
                optimizer.state[p].pop("momentum_buffer", None)


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
            applies=bool(_now(group)),
            off=_off(group),
            normalises=is_adam,
            besides="; a scheduler that sets it needs cycle_momentum=False",
        )
        check_once(momentum, nesterov, own)


def settle_momentum(optimizer: Any, config: Method, deferred: Mapping[str, str]) -> Method:
    """The settings that fit an optimizer, with its own momentum if it is taken over.

    Args:
        optimizer: of the gradients.
        config: the settings.
        deferred: which of them are left to the compressor; "momentum": TAKE_OVER or AUTO.

    Raises:
        ConfigError: it would be applied twice, or cannot be taken over.
    """
    normalises = isinstance(optimizer, (Adam, AdamW))
    is_known = normalises or isinstance(optimizer, SGD)
    config = fitted(config, deferred, normalises=normalises if is_known else None)
    asked = deferred.get("momentum")
    if asked is None:
        check_not_twice(optimizer, config.momentum, nesterov=config.nesterov)
        return config
    if asked == AUTO and (why := _why_left(optimizer, config)):
        log.info("TopKEF leaves momentum to %s: %s", type(optimizer).__name__, why)
        return config
    return replace(config, **own_momentum(optimizer), taken_over=True)


def _why_left(optimizer: Any, config: Method) -> str:
    """Why a momentum is not taken over although it may be; empty: it is."""
    if not isinstance(optimizer, KNOWN):
        return f"it is none of {WORDS.known}"
    if not _steps_as_known(optimizer):
        return f"its step() is not that of {WORDS.known}"
    found = [_own(group) for group in optimizer.param_groups]
    if None in found:
        return "it is dampened"
    if not any(each[0] for each in found if each is not None):
        return "it has none"
    if why := why_not_corrected(config):
        return why
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    wide = torch.float32, torch.float64
    narrow = {str(p.dtype) for p in parameters if p.requires_grad and p.dtype not in wide}
    return f"gradients are {', '.join(sorted(narrow))}" if narrow else ""


def _steps_as_known(optimizer: Any) -> bool:
    """Whether a class that derives from a known one leaves its `step` alone; Horovod's is none."""
    found = (vars(cls)["step"] for cls in type(optimizer).__mro__ if "step" in vars(cls))
    steps = (inspect.unwrap(step) for step in found)
    own = next(step for step in steps if not step.__module__.startswith("horovod."))
    known: list[Any] = list(KNOWN)
    return own in [inspect.unwrap(each.step) for each in known]


def own_momentum(optimizer: Any) -> dict[str, Any]:
    """The settings that stand for the optimizer's momentum, the largest of its parameter groups.

    Raises:
        ConfigError: it has none that could be corrected.
    """
    kind, is_known = type(optimizer).__name__, isinstance(optimizer, (SGD, Adam, AdamW))
    found = [_own(group) for group in optimizer.param_groups] if is_known else [None]
    own = None if None in found else max(each for each in found if each is not None)
    return settings_of(kind, own, WORDS)


def give_back(optimizer: Any, momentum: float = 0.0, *, nesterov: bool = False) -> None:
    """Let the optimizer have what was set off, or taken over by a version that set it to 0.

    Args:
        optimizer: maybe with the parameter groups of a checkpoint of a run that was compressed.
        momentum: of the settings, if it is a number; nesterov: of these.
    """
    for group in optimizer.param_groups:
        before = _now(group)
        if momentum and not before:
            _set(group, momentum, nesterov=nesterov)
        _restore(group)
        if _now(group) != before:
            log.info("TopKEF leaves momentum=%s to %s", _now(group), type(optimizer).__name__)


def _restore(group: Any) -> None:
    """Undo what older versions did to a parameter group that is in a checkpoint: momentum 0."""
    factor, nesterov = group.pop(TAKEN, (0.0, False))
    if factor and not _now(group):
        _set(group, float(factor), nesterov=bool(nesterov))


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


def _shown(group: Any) -> str:
    keys = [key for key in ("betas", "momentum", "dampening") if key in group]
    return ", ".join(f"{key}={group[key]}" for key in keys) or "none"


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


def advise(optimizer: Any, config: Method) -> None:
    """Warn of an Adam whose own momentum is not corrected, and could be."""
    if config.momentum or not isinstance(optimizer, (Adam, AdamW)) or why_not_corrected(config):
        return
    if any(group["betas"][0] for group in optimizer.param_groups):
        advise_of(type(optimizer).__name__)


def _off(group: Any) -> str:
    return f"betas=(0, {group['betas'][1]})" if "betas" in group else "momentum=0"
