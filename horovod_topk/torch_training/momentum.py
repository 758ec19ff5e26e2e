"""Momentum correction for PyTorch's optimizers: momentum is applied exactly once.

SGD has no momentum of its own during its step, and computes p -= lr * v with the corrected velocity
v. Adam and AdamW divide by the root of a mean square, so that the scale of v does not matter: with
betas=(0, b) they use v instead of their first moment, and the square of v instead of that of the
gradient.

A momentum that is taken over is set to 0 only during the step: at all other times parameter groups
are as the user, or a scheduler, has set them. Gradients hold (1 - m) v between exchange and step,
and SGD's learning rate is divided by 1 - m during the step.
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
    HAS_NONE,
    Own,
    Words,
    check_once,
    fitted,
    kind_of,
    none_to_correct,
    not_a_momentum,
    note_followed,
    rule_of_arrivals,
    settings_of,
    warn_of_loaded,
    why_not_by_arrivals,
    why_not_corrected,
)
from horovod_topk.core.momentum_takeover import advise as advise_of
from horovod_topk.methods.protocol import Method
from horovod_topk.torch_training.group_settings import betas_of, momentum_of, number_of
from horovod_topk.torch_training.momentum_saved import TAKEN, drop_loaded
from horovod_topk.torch_training.tracing import untraced

log = logging.getLogger("horovod_topk")

WORDS = Words("torch.optim.SGD, Adam or AdamW", "momentum=0.9 or betas=(0.9, 0.999)")
KNOWN = SGD, Adam, AdamW


class Loan:
    """Sets an optimizer's own momentum to 0 during each step, and restores it afterwards.

    Args:
        optimizer: SGD, Adam or AdamW.
        names: names of parameters; parameters without one are not compressed.

    Attributes:
        warnings: texts of the warnings given.
    """

    def __init__(self, optimizer: Any, names: Mapping[Any, str]) -> None:
        self._optimizer = weakref.ref(optimizer)  # it holds the hooks, and so this object
        self._names = names
        self._met: list[Any] = []  # known parameter groups; any other was loaded or added
        self._factors: list[float] = []  # momentum of the last exchange, by parameter group
        self._lent: list[dict[str, Any]] | None = None  # saved settings by group, during a step
        self._put: list[dict[str, Any]] = []  # what these settings are meanwhile
        self.warnings: tuple[str, ...] = ()
        self._guard = Watch(None)
        # About the present or last step: whether it was exchanged without momentum correction, and
        # whether the mean of the ranks' velocities was exchanged.
        self._is_over, self._hands_over = False, False

    def lends_for(self, guard: Watch) -> None:
        """Return the momentum to the optimizer when this guard ends compression."""
        self._guard, guard.hands_over, guard.takes_back = guard, True, True

    @property
    def is_over(self) -> bool:
        """Whether the optimizer applies its own momentum in the next step."""
        return not self._guard.corrects

    @property
    def is_repaid(self) -> bool:
        """Whether the momentum is in the optimizer's buffers instead of in TopKEF's velocities."""
        return self._guard.is_with_optimizer

    def groups(self, optimizer: Any) -> list[Any]:
        """The parameter groups as the user has set them, also during a step of the optimizer."""
        lent = self._lent or []
        added: list[dict[str, Any]] = [{}] * (len(optimizer.param_groups) - len(lent))
        pairs = zip(optimizer.param_groups, lent + added, strict=False)
        return [{**group, **own} for group, own in pairs]

    def is_met(self, group: Any) -> bool:
        """Whether a parameter group was there in an earlier exchange or step."""
        return any(group is each for each in self._met)

    def now(self) -> dict[str, Momentum]:
        """Momentum of each parameter in the next step, by name; empty if the optimizer applies it.

        Raises:
            ConfigError: a parameter group has a momentum that can no longer be corrected.
        """
        optimizer: Any = self._optimizer()
        was_over = self._is_over or self._guard.is_taking_back
        self._is_over = self.is_over
        self._hands_over = self._guard.is_handing_over
        if self._is_over:
            return {}
        if was_over:  # the optimizer's buffers become our velocities
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
        """Set the optimizer's momentum to 0, before it applies gradients.

        The factor is the momentum at the exchange: a scheduler may have changed it since.
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
                # With a momentum and no buffer yet, SGD copies the gradient to its buffer.
                momentum = factor if self._hands_over else 0.0
                group.update(momentum=momentum, nesterov=False, lr=group["lr"] / (1.0 - factor))
        self._note_put(optimizer)

    def _note_put(self, optimizer: Any) -> None:
        """Remember the values that the step has in the parameter groups; others are a user's."""
        pairs = zip(optimizer.param_groups, self._lent or (), strict=False)
        self._put = [{key: group[key] for key in lent} for group, lent in pairs]

    def take_back(self, optimizer: Any) -> None:
        """Restore the momentum of the parameter groups, after a step.

        If the mean velocities were exchanged, the optimizer's buffers have them now: Adam's buffer
        has 1 - m times the velocity, as the gradients had, and SGD's has the velocity.
        """
        if self._lent is not None and self._hands_over:
            for group, factor in zip(optimizer.param_groups, self._factors, strict=False):
                for buffer in () if "betas" in group else _buffers(optimizer, group):
                    buffer.div_(1.0 - factor)
        groups = zip(optimizer.param_groups, self._lent or (), self._put, strict=False)
        for group, lent, put in groups:  # a user may have set it, if the step has failed
            group.update({key: own for key, own in lent.items() if group[key] is put[key]})
        self._lent, self._put = None, []

    def velocities(self) -> dict[str, Tensor]:
        """The optimizer's momentum buffers as velocities, flat, by name."""
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
        """Restore parameter groups that a checkpoint has loaded, and drop their loaded buffers."""
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
    """SGD's momentum buffers of a parameter group."""
    states = (optimizer.state.get(p, {}) for p in group["params"])
    found = (own.get("momentum_buffer") for own in states)
    return [buffer for buffer in found if buffer is not None]


def _drop_buffers(optimizer: Any) -> None:
    """Remove SGD's momentum buffers."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p in optimizer.state:
                optimizer.state[p].pop("momentum_buffer", None)


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
            raise none_to_correct(momentum, kind, WORDS.known)
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


def fit_momentum(optimizer: Any, config: Method, deferred: Mapping[str, str]) -> Method:
    """Fill in the settings that depend on the optimizer, such as a momentum that is taken over.

    Args:
        optimizer: the optimizer of the gradients.
        config: the settings.
        deferred: settings that are left to the compressor; "momentum": TAKE_OVER or AUTO.

    Raises:
        ConfigError: momentum would be applied twice, or cannot be taken over.
    """
    normalises = isinstance(optimizer, (Adam, AdamW))
    is_known = normalises or isinstance(optimizer, SGD)
    asked, kind = deferred.get("momentum"), kind_of(optimizer)
    rule = rule_of_arrivals(config, asked, normalises=normalises if is_known else None)
    why_not = why_not_corrected if rule is None else why_not_by_arrivals
    why = _why_left(optimizer) or why_not(config) if asked == AUTO else ""
    follows = rule is not None and not why
    config = fitted(config, deferred, normalises=normalises if is_known else None, follows=follows)
    if asked is None:
        check_not_twice(optimizer, config.momentum, nesterov=config.nesterov)
    elif why:
        log.info("TopKEF leaves momentum to %s: %s", kind, why)
    elif follows:
        note_followed(kind)
        # In each step a group's own beta 2 counts: `second_moments`.
        betas = [betas_of(group)[1] for group in optimizer.param_groups if normalises]
        largest = max((beta for beta in betas if beta is not None), default=None)
        config = replace(config, by_arrivals=rule, beta2=largest)
    else:
        config = replace(config, **own_momentum(optimizer), taken_over=True)
    return config


def _why_left(optimizer: Any) -> str:
    """Reason why momentum="auto" cannot take this optimizer's momentum over; empty: it can."""
    if not isinstance(optimizer, KNOWN):
        return f"it is none of {WORDS.known}"
    if not _steps_as_known(optimizer):
        return f"its step() is not that of {WORDS.known}"
    if not all(map(_has_numbers, optimizer.param_groups)):
        return f"its parameter groups have {_shown(optimizer.param_groups[0])}"
    found = [_own(group) for group in optimizer.param_groups]
    if None in found:
        return "it is dampened"
    if not any(each[0] for each in found if each is not None):
        return HAS_NONE
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    wide = torch.float32, torch.float64
    narrow = {str(p.dtype) for p in parameters if p.requires_grad and p.dtype not in wide}
    return f"gradients are {', '.join(sorted(narrow))}" if narrow else ""


def _steps_as_known(optimizer: Any) -> bool:
    """Whether an optimizer has the `step` of SGD, Adam or AdamW, below Horovod's own `step`."""
    found = (vars(cls)["step"] for cls in type(optimizer).__mro__ if "step" in vars(cls))
    steps = (inspect.unwrap(step) for step in found)
    own = next(step for step in steps if not step.__module__.startswith("horovod."))
    known: list[Any] = list(KNOWN)
    return own in [inspect.unwrap(each.step) for each in known]


def own_momentum(optimizer: Any) -> dict[str, Any]:
    """Settings that replace the optimizer's momentum, the largest of its parameter groups.

    Raises:
        ConfigError: the optimizer has no momentum that could be corrected.
    """
    kind, is_known = kind_of(optimizer), isinstance(optimizer, (SGD, Adam, AdamW))
    found = [_own(group) for group in optimizer.param_groups] if is_known else [None]
    own = None if None in found else max(each for each in found if each is not None)
    return settings_of(kind, own, WORDS)


def give_back(optimizer: Any, momentum: float = 0.0, *, nesterov: bool = False) -> None:
    """Restore an optimizer's momentum that was set to 0 for momentum correction.

    Args:
        optimizer: its parameter groups may come from a checkpoint of a compressed run.
        momentum: the momentum of the settings, if it is a number.
        nesterov: whether that momentum is Nesterov's.
    """
    for group in optimizer.param_groups:
        before = _now(group)
        if momentum and not before:
            _set(group, momentum, nesterov=nesterov)
        _restore(group)
        if _now(group) != before:
            log.info("TopKEF leaves momentum=%s to %s", _now(group), kind_of(optimizer))


def _restore(group: Any) -> None:
    """Restore a parameter group's momentum, which checkpoints of older versions have set to 0."""
    factor, nesterov = group.pop(TAKEN, (0.0, False))
    if factor and not _now(group):
        _set(group, float(factor), nesterov=bool(nesterov))


def _own(group: Any) -> tuple[float, bool] | None:
    """A parameter group's momentum, its own or the one taken over, and whether it is Nesterov's.

    Returns:
        None, if the momentum is dampened or no number, or the group has none to correct.
    """
    if "betas" not in group and ("momentum" not in group or group.get("dampening")):
        return None
    if not _now(group) and TAKEN in group:
        momentum, nesterov = group[TAKEN]
        return float(momentum), bool(nesterov)
    own = momentum_of(group)
    return None if own is None else (own, bool(group.get("nesterov", False)))


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


def advise(optimizer: Any, config: Method, asked: str | None) -> tuple[str, ...]:
    """Warn about an optimizer whose steps do not take into account that gradients arrive late.

    asked: the momentum that is left to the compressor; None: it was given, or there is none.

    Returns:
        The warnings that were given: one or none.
    """
    has_beta1 = any(_now(group) for group in optimizer.param_groups if "betas" in group)
    normalises = isinstance(optimizer, (Adam, AdamW)) and has_beta1
    why = _why_left(optimizer) if asked == AUTO else ""
    return advise_of(kind_of(optimizer), config, why, normalises=normalises)


def _off(group: Any) -> str:
    return f"betas=(0, {group['betas'][1]})" if "betas" in group else "momentum=0"
