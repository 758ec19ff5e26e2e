"""What an exchange has to know of PyTorch's optimizers: their hooks, settings and momentum.

A number for the setting `momentum` is applied exactly once. SGD then has no momentum of its own,
and computes p -= lr * v with the corrected velocity v. Adam and AdamW divide by the root of a mean
square, so that the scale of v does not matter: with betas=(0, b) they use v instead of their first
moment, and the square of v instead of that of the gradient.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer

from horovod_topk.core.run.optimizers import (
    HAS_NONE,
    advise,
    check_once,
    fitted,
    guarded,
    kind_of,
    none_to_correct,
    note_adapted,
)
from horovod_topk.core.state.learning_rates import Rates, fall_of
from horovod_topk.errors import ConfigError
from horovod_topk.methods.protocol import Method
from horovod_topk.torch_training.tracing import untraced
from horovod_topk.updates import tracker
from horovod_topk.updates.formulas import LINEAR, UNKNOWN, default_ratio, family_of
from horovod_topk.updates.tracker import Rule

log = logging.getLogger("horovod_topk")

KNOWN = "torch.optim.SGD, Adam or AdamW"
TAKEN = "topkef_momentum"  # in parameter groups of older checkpoints, which have a momentum of 0


# Numbers in parameter groups.


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
    """Return a group's momentum or first beta; 0: it has none; None: it is no number."""
    if "betas" in group:
        return 0.0 if group["betas"] is None else next(iter(betas_of(group)), 0.0)
    momentum = group.get("momentum")
    return 0.0 if momentum is None else number_of(momentum)


def number_in(optimizer: Any, group: Mapping[str, Any], setting: str) -> float:
    """Return a setting of a parameter group as a float."""
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


# Learning rates.


def optimizer_rates(optimizer: Any, config: Method, names: Mapping[Any, str]) -> Rates | None:
    """Learning rates that residuals are rescaled by; None if `follow_lr` is off.

    Rates are read when a step's first bucket is sent, before `optimizer.step()`. If a scheduler
    steps after the optimizer, as PyTorch recommends, the next step uses the new rate; if it steps
    before the optimizer, the new rate is used a step late. Reading a rate that is a tensor on an
    accelerator waits for the device.

    A rate that becomes None, or anything else that is no number, leaves residuals in the units that
    they have, as a rate of 0 does.

    names: name of each parameter; parameters without a name are left out.
    """
    if not config.follow_lr:
        return None
    if why := why_rate_unknown(optimizer):
        raise ConfigError(f"follow_lr=True was given, and {why}", cure="Leave follow_lr= out")
    held = weakref.ref(optimizer)  # weak: the optimizer refers to the state, which refers to this
    return Rates(lambda: rates_of(held(), names), partial(fall_of, config))


def why_rate_unknown(optimizer: Any) -> str:
    """Reason why residuals cannot follow an optimizer's learning rates; empty: they can."""
    for number, group in enumerate(optimizer.param_groups):
        if number_of(group.get("lr")) is None:
            shown = f"lr={group['lr']!r:.60}, which is no number" if "lr" in group else "no lr"
            return f"parameter group {number} of {kind_of(optimizer)} has {shown}"
    return ""


def rates_of(optimizer: Any, names: Mapping[Any, str]) -> dict[str, float]:
    """The present learning rate of each parameter, by name."""
    rates = dict[str, float]()
    for group in optimizer.param_groups:
        rate = number_of(group.get("lr"))
        if rate is not None:
            rates |= {names[p]: rate for p in group["params"] if p in names}
    return rates


def moved_by(optimizer: Any) -> Iterator[tuple[Any, bool]]:
    """Each parameter of an optimizer, and whether a step moves it: its learning rate is not 0.

    A rate that is a tensor on an accelerator waits for the device.
    """
    for group in optimizer.param_groups:
        moves = number_of(group.get("lr")) != 0.0
        for p in group["params"]:
            yield p, moves


def frozen(held: Callable[[], Any], names: Mapping[Any, str]) -> set[str]:
    """Names of the parameters that an optimizer's steps do not move now.

    Their learning rate is 0, or they need no gradient any more.
    """
    if (optimizer := held()) is None:
        return set()
    still = {names[p] for p, moves in moved_by(optimizer) if not moves and p in names}
    return still | {name for p, name in names.items() if not p.requires_grad}


# Momentum.


def check_not_twice(optimizer: Any, momentum: float, *, nesterov: bool = False) -> None:
    """Refuse an optimizer that would apply a momentum of its own to corrected gradients."""
    if not momentum:
        return
    kind, is_adam = kind_of(optimizer), isinstance(optimizer, (Adam, AdamW))
    for number, group in enumerate(optimizer.param_groups):
        if not is_adam and "momentum" not in group:
            raise none_to_correct(momentum, kind, KNOWN)
        setting = "betas" if is_adam else "momentum"
        check_once(
            kind,
            momentum,
            nesterov=nesterov,
            where=f"parameter group {number} of the optimizer",
            setting=setting,
            shown=group[setting],
            applies=momentum_of(group) != 0.0,
            off=f"betas=(0, {group['betas'][1]})" if "betas" in group else "momentum=0",
            normalises=is_adam,
            besides="; a scheduler that sets it needs cycle_momentum=False",
        )


def fit_settings(
    optimizer: Any, config: Method, deferred: Mapping[str, str]
) -> tuple[Method, Rule | None, tuple[str, ...]]:
    """Fill in the settings that depend on the optimizer, and on how its steps are adapted.

    Warn about an optimizer whose steps do not take into account that gradients arrive late.
    """
    config, rule, warnings = fit_momentum(optimizer, config, deferred)
    config = guarded(config, deferred)
    if "follow_lr" in deferred:
        why = why_rate_unknown(optimizer)
        config = replace(config, follow_lr=not why)
        if why:
            log.info("TopKEF does not follow learning rates: %s", why)
    return config, rule, warnings


def fit_momentum(
    optimizer: Any, config: Method, deferred: Mapping[str, str]
) -> tuple[Method, Rule | None, tuple[str, ...]]:
    """Fit the momentum setting to the optimizer, and return the rule of its steps, and warnings."""
    _check_eps(optimizer, config)
    kind, family = kind_of(optimizer), family_of(optimizer)
    if "momentum" in deferred:
        give_back(optimizer)
    config, why = fitted(
        config,
        deferred,
        kind,
        lambda: _why_left(optimizer),
        ratio=default_ratio(family, _first_beta(optimizer)),
        is_linear=family is LINEAR,
    )
    check_not_twice(optimizer, config.momentum, nesterov=config.nesterov)
    if why is None:
        return config, _rule_of(optimizer), note_adapted(kind, is_known=family is not UNKNOWN)
    has_beta1 = any(_now(group) for group in optimizer.param_groups if "betas" in group)
    normalises = isinstance(optimizer, (Adam, AdamW)) and has_beta1
    return config, None, advise(kind, config, why, normalises=normalises)


def _rule_of(optimizer: Any) -> Rule:
    """Return the rule by which steps are adapted: `OWN`, unless their update is written here."""
    is_known = (
        isinstance(optimizer, (SGD, Adam, AdamW))
        and _steps_as_known(optimizer)
        and all(map(_has_numbers, optimizer.param_groups))
        and any(map(_now, optimizer.param_groups))
    )
    if not is_known:
        return tracker.OWN
    return tracker.SGD if isinstance(optimizer, SGD) else tracker.ADAM


def _check_eps(optimizer: Any, config: Method) -> None:
    """Refuse an Adam that divides by 0 where no gradient has arrived yet."""
    if not isinstance(optimizer, (Adam, AdamW)) or (config.ratio == 1.0 and not config.withheld()):
        return
    for group in optimizer.param_groups:
        # Its fused steps compute in float32 at least.
        kinds = {torch.float32 if group.get("fused") else p.dtype for p in group["params"]}
        for kind in kinds:
            eps = torch.tensor(group["eps"], dtype=kind, device="cpu")
            if kind.is_floating_point and not eps:
                raise ConfigError(
                    f"{kind_of(optimizer)} has eps={group['eps']}, which is 0 in {kind}: weights "
                    "whose gradients have not arrived yet would become 0 / 0",
                    cure="Pass a larger eps, such as 1e-8, or 1e-7 for float16",
                )


def _why_left(optimizer: Any) -> str:
    """Reason why momentum="auto" leaves this optimizer's steps as they are; empty: none."""
    if len(inner := list(_inside(optimizer, "optimizer"))) > 1:
        return f"it steps others. Attach these instead, attach(model, [{', '.join(inner)}])"
    groups = optimizer.param_groups
    if any(group.get("differentiable") for group in groups):
        return "it is differentiable"
    if hasattr(optimizer, "second_step") or isinstance(optimizer, LBFGS):
        return "its steps are not of one gradient"
    if hasattr(optimizer, "exchange_settings"):  # `OneBitAdam`, `OneBitLamb`
        return "it exchanges its momentum"
    if family_of(optimizer) is not LINEAR:
        return ""
    if not isinstance(optimizer, SGD) or not any(map(momentum_of, groups)):
        return HAS_NONE
    if not _steps_as_known(optimizer):
        return f"its step() is not that of {KNOWN}"
    if not all(map(_has_numbers, groups)):
        keys = [key for key in ("momentum", "dampening") if key in groups[0]]
        shown = ", ".join(f"{key}={groups[0][key]}" for key in keys)
        return f"its parameter groups have {shown}"
    return "it is dampened" if any(group.get("dampening") for group in groups) else ""


def _steps_as_known(optimizer: Any) -> bool:
    """Whether an optimizer has the `step` of SGD, Adam or AdamW, below Horovod's own `step`."""
    found = (vars(cls)["step"] for cls in type(optimizer).__mro__ if "step" in vars(cls))
    steps = (inspect.unwrap(step) for step in found)
    own = next(step for step in steps if not step.__module__.startswith("horovod."))
    known: list[Any] = [SGD, Adam, AdamW]
    return own in [inspect.unwrap(each.step) for each in known]


def give_back(optimizer: Any, momentum: float = 0.0, *, nesterov: bool = False) -> None:
    """Restore an optimizer's momentum that was set to 0 for momentum correction.

    optimizer: its parameter groups may come from a checkpoint of an older version, which has
        set the momentum to 0.
    """
    for group in optimizer.param_groups:
        before, (own, own_nesterov) = _now(group), group.pop(TAKEN, (momentum, nesterov))
        if own and not before:
            if "betas" in group:
                group["betas"] = (float(own), group["betas"][1])
            else:
                group["momentum"], group["nesterov"] = float(own), bool(own_nesterov)
            log.info("TopKEF leaves momentum=%s to %s", own, kind_of(optimizer))


def _now(group: Any) -> float:
    """The momentum that the optimizer itself applies; 0 if it is no number."""
    return momentum_of(group) or 0.0


def _first_beta(optimizer: Any) -> float | None:
    """The largest first beta of an optimizer's groups; None: it has none that is a number."""
    firsts = (next(iter(betas_of(group)), None) for group in optimizer.param_groups)
    return max((first for first in firsts if first is not None), default=None)


def _has_numbers(group: Any) -> bool:
    """Return whether the hyperparameters of an SGD, Adam or AdamW group are plain numbers."""
    if "betas" in group:
        return len(betas := betas_of(group)) == 2 and None not in betas
    return None not in (momentum_of(group), number_of(group["dampening"]))


def hand_over(optimizer: Any, momentum: float, *, nesterov: bool) -> Any:
    """Let the optimizer apply the momentum itself; return the handle of a hook on its steps.

    For SGD the result is the same. Adam's second moment then has squares of gradients, not of
    velocities, as in training with a single process.
    """
    check_not_twice(optimizer, momentum, nesterov=nesterov)
    give = partial(give_back, momentum=momentum, nesterov=nesterov)
    give(optimizer)
    if momentum:
        name = kind_of(optimizer)
        log.warning("TopKEF compresses nothing, and leaves momentum=%s to %s", momentum, name)
    # A checkpoint may set it to 0.
    return optimizer.register_step_pre_hook(untraced(lambda it, *_: give(it)))


# Hooks.

ONE = "Pass a torch.optim.Optimizer of all parameters that the model trains"
REGISTER = (
    "register_step_pre_hook",
    "register_step_post_hook",
    "register_state_dict_pre_hook",  # PyTorch 2.1
)
DEEPEST = 4  # wrappers around one another


def check_has_hooks(optimizer: Any) -> None:
    """Refuse an object whose steps call no hooks, before any hook is registered."""
    if has_hooks(optimizer):
        return
    kind = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
    found = next(_inside(optimizer, "optimizer"), None)
    if found is not None:
        raise ConfigError(
            f"{kind} wraps an optimizer, and its own steps call no hooks of PyTorch, which "
            "compression needs",
            cure=f"Pass the optimizer inside it, {found}, and go on calling the wrapper's step()",
        )
    if isinstance(optimizer, Optimizer):
        problem = f"{kind} has not called Optimizer.__init__, so that its steps call no hooks"
        cure = "Call super().__init__(params, defaults) in its __init__, or pass the optimizer that"
        raise ConfigError(problem, cure=f"{cure} it wraps")
    is_module = isinstance(optimizer, nn.Module)
    cure = "Pass the model first, and then the optimizer" if is_module else ONE
    raise ConfigError(f"the optimizer is {optimizer!r:.60}, which is no optimizer", cure=cure)


def has_hooks(optimizer: Any) -> bool:
    """Whether an optimizer's steps call hooks, and hooks can be registered with it."""
    if not isinstance(optimizer, Optimizer):
        return False
    if not getattr(type(optimizer).step, "hooked", False):  # set by Optimizer.__init__
        return False
    try:
        for name in REGISTER:
            if hasattr(optimizer, name):
                getattr(optimizer, name)(lambda *_: None).remove()
    except AttributeError:  # a dictionary that Optimizer.__init__ makes is missing
        return False
    return hasattr(optimizer, "param_groups") and hasattr(optimizer, "state")


def _inside(wrapper: Any, path: str, depth: int = DEEPEST) -> Iterator[str]:
    """Yield expressions for the optimizers with hooks among an object's attributes."""
    attributes = getattr(wrapper, "__dict__", {}) if depth else {}
    for own, value in attributes.items():
        public = own.lstrip("_")  # as Lightning's property `optimizer`
        name = public if getattr(wrapper, public, None) is value else own
        for item, each in _items(value):
            if each is not wrapper and hasattr(each, "param_groups") and hasattr(each, "step"):
                if has_hooks(each):
                    yield f"{path}.{name}{item}"
                else:
                    yield from _inside(each, f"{path}.{name}{item}", depth - 1)


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    """A value, or the items of one that is a list, tuple or dictionary, with their subscripts."""
    if isinstance(value, list | tuple):
        yield from ((f"[{at}]", each) for at, each in enumerate(value))
    elif isinstance(value, dict):
        yield from ((f"[{key!r}]", each) for key, each in value.items())
    else:
        yield "", value
