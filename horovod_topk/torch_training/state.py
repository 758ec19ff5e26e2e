"""Error feedback of PyTorch optimizers, as the adapters of Horovod and torch DDP share it.

An adapter chooses the gradients and the collective, notes when each gradient is ready, and writes
the exchanged gradients back. All other parts of a step are here and in `steps.py`.
"""

from __future__ import annotations

import abc
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from horovod_topk import reporting
from horovod_topk.core.codec.codec import PayloadCodec
from horovod_topk.core.exchange.agreement import agree
from horovod_topk.core.exchange.membership import check_elastic, elastic
from horovod_topk.core.exchange.selection import exchange_of
from horovod_topk.core.plan.buckets import Plan
from horovod_topk.core.run.attached import Attached
from horovod_topk.core.run.base_compressor import BaseCompressor
from horovod_topk.core.run.optimizers import kind_of
from horovod_topk.core.run.runner import StepRunner
from horovod_topk.core.run.stats import Stats, describe
from horovod_topk.core.run.timing import Timed
from horovod_topk.core.state.state_dict import (
    METHOD_STATE,
    OWNED,
    RESIDUALS,
    STEPS,
    of_several,
    shared_out,
)
from horovod_topk.methods.protocol import Method
from horovod_topk.ops.torch import TorchOps
from horovod_topk.torch_training import optimizer_settings as settings
from horovod_topk.torch_training.gradients import Buckets, plan_of
from horovod_topk.torch_training.onebit_adam import OneBitAdam
from horovod_topk.torch_training.own_steps import updates_of
from horovod_topk.torch_training.preprocessing import Preprocessing, check_scaler, clip_alone
from horovod_topk.torch_training.steps import Hooks, check_evaluates_once
from horovod_topk.torch_training.updates import moments
from horovod_topk.updates.tracker import Rule, Tracker

log = logging.getLogger("horovod_topk")

_LIVE: weakref.WeakSet[TrainingState] = weakref.WeakSet()


def live_states() -> list[TrainingState]:
    """States of all optimizers in this process whose gradients are compressed."""
    return list(_LIVE)


class TrainingCompressor(BaseCompressor):
    """A compressor with weak references to the states of the optimizers that use it."""

    framework = "torch"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._begin()

    def _begin(self) -> None:
        self._states: weakref.WeakSet[TrainingState] = weakref.WeakSet()

    def attached(self, state: TrainingState) -> None:
        """Remember an optimizer's state."""
        self._states.add(state)
        reporting.watch(state)

    @staticmethod
    def _check_scaler(scaler: object) -> None:
        check_scaler(scaler)

    def _living_states(self) -> list[TrainingState]:
        return list(self._states)


class TrainingState(Attached[StepRunner[Tensor]], abc.ABC):
    """Error feedback of one optimizer, or of all that a model has.

    `Attached` has the methods for users. Each optimizer has a plan, a step runner and hooks of its
    own, so that it commits its own steps.

    Args:
        ranks: Horovod's process set, or an object with its methods.
    """

    framework = "torch"
    hooks: ClassVar[type[Hooks]]  # the adapter's hooks on an optimizer
    _each: Sequence[Hooks] = ()  # those of each optimizer, if it is active

    def __init__(self, optimizers: Sequence[Any], ranks: Any, label: str) -> None:
        for optimizer in optimizers:
            settings.check_has_hooks(optimizer)
        super().__init__(ranks, "average", label)
        self._other_handles: list[Any] = []  # of hooks that are not in `_each`

    @property
    def _states(self) -> Sequence[StepRunner[Tensor]]:
        return [hooks.compressor for hooks in self._each]

    def has(self, optimizer: Any) -> bool:
        """Whether gradients are compressed for this optimizer."""
        return any(hooks.optimizer() is optimizer for hooks in self._each)

    def _hooks_for(
        self,
        optimizer: Any,
        names: Mapping[Tensor, str],
        compressor: TrainingCompressor,
        collective: Timed[Tensor],
        reduction: str = "average",
        groups: Iterable[Sequence[Tensor]] = (),
        beside: Sequence[Hooks] = (),
    ) -> Hooks:
        """Agree with all ranks on the plan of an optimizer's gradients, and allocate memory.

        names: names of its parameters; parameters without one are not compressed. There may be
            names of parameters of other optimizers.
        beside: what was made for the model's other optimizers.
        """
        check_elastic(compressor.config)
        check_evaluates_once(optimizer)
        asked = compressor.config, compressor.deferred
        config, rule, warnings = settings.fit_settings(optimizer, *asked)
        if isinstance(optimizer, OneBitAdam):
            config = optimizer.exchange_settings(config, names)
        plan = plan_of(optimizer, names, config, reduction, groups)
        plan = plan.under(plan.config, rule)  # whose rules for ratios are applied
        scaler = compressor.grad_scaler
        preprocessing = Preprocessing.of(scaler, plan, optimizer)
        agreed = {"optimizer": kind_of(optimizer), "has_scaler": scaler is not None}
        name = _agreed_name(plan, collective, beside, **agreed)
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        names = {p: names[p] for p in parameters if p in names}
        own = _compressor_of(optimizer, names, plan, rule, name, collective)
        updates = None if rule is None else updates_of(rule, optimizer, names, own)
        of_hooks = optimizer, own, Buckets(names, plan), preprocessing, updates
        hooks = type(self).hooks(*of_hooks, has_scaler=scaler is not None)
        hooks.name, hooks.warnings = name, [*warnings]
        own.position = len(beside)
        return hooks

    def _use(self, *each: Hooks) -> None:
        """Compress gradients by these hooks from now on, those of each optimizer."""
        self._each = each
        self._compressor = self._state = each[0].compressor
        for hooks in each:
            plan = hooks.compressor.plan
            self._reduction = plan.reduction
            self._skipped |= plan.sent_dense()

    def _watch(self, hooks: Hooks, optimizer: Any, accumulations: Any) -> None:
        """Register hooks on the optimizer's steps; for `accumulations` see `Hooks.watch`."""
        try:
            hooks.watch(optimizer, accumulations)
        except BaseException:
            hooks.remove()
            raise
        _LIVE.add(self)

    def detach(self) -> None:
        """Remove all hooks from optimizer and gradients, as the adapter could not begin."""
        for handle in self._other_handles:
            handle.remove()
        for hooks in self._each:
            hooks.remove()
        _LIVE.discard(self)

    def _leave(
        self,
        optimizer: Any,
        config: Method,
        gradients: Callable[[], Sequence[Tensor]] | None = None,
    ) -> None:
        """Apply momentum and clipping to an optimizer that exchanges nothing."""
        momentum, nesterov = config.momentum, config.nesterov
        self._other_handles.append(settings.hand_over(optimizer, momentum, nesterov=nesterov))
        if config.clip_norm is not None:
            self._other_handles.append(clip_alone(optimizer, config.clip_norm, gradients))

    # Methods for users.

    @torch.no_grad()
    def stats(self) -> Stats:
        """As `Attached.stats`."""
        if self.active:
            self.warnings = tuple(text for hooks in self._each for text in hooks.warnings)
        return super().stats()

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `Attached.load_state_dict`."""
        super().load_state_dict(state)
        self._drop_step()

    def reset(self) -> None:
        """As `Attached.reset`."""
        super().reset()
        self._drop_step()

    def forget(self) -> None:
        """As `Attached.forget`."""
        super().forget()
        self._drop_step()

    @abc.abstractmethod
    def _drop_step(self) -> None:
        """Discard a step that has begun, with its exchanged gradients."""


def inherit(before: Sequence[StepRunner[Tensor]], new: Sequence[StepRunner[Tensor]]) -> None:
    """Load the states with which the compression of new optimizers begins.

    They inherit the residuals of ranks and owners, and the method's own state. Momentum,
    arrivals, learning rates, warm-up, the ratio asked for and the guard's memory start anew, as
    they belong to the optimizer that was replaced: in the first steps of a new one its moments
    form.

    A residual that has grown because the learning rate has fallen (`core.state.learning_rates`) is
    scaled back to gradients at the largest rate: the new optimizer's learning rate has no relation
    to the old one's, and may be of another kind (SGD's and Adam's).
    """
    states = [runner.state_dict() for runner in before]
    for runner, state in zip(before, states, strict=True):
        for holder in (state, state.get(OWNED, {})):
            for name, residual in holder.get(RESIDUALS, {}).items():
                residual.mul_(runner.decay(name))
    ended = max(runner.ended for runner in before)
    parts = shared_out(
        of_several([(state, ended) for state in states]), [runner.specs().keys() for runner in new]
    )
    for runner, part in zip(new, parts, strict=True):
        of_method = {METHOD_STATE + n for n, p in runner.states.items() if not p.is_optional}
        kept = {key: part[key] for key in part if key in {RESIDUALS, OWNED, *of_method}}
        runner.load_state_dict({**runner.state_dict(), **kept, STEPS: ended})


def _agreed_name(
    plan: Plan, collective: Timed[Tensor], beside: Sequence[Hooks], **agreed: Any
) -> tuple[str, int]:
    """Agree with all ranks on a plan and its optimizer's number, and return its name."""
    prefix = plan.config.name or f"topkef.{plan.digest.hex()}"
    names = [hooks.name for state in live_states() for hooks in state._each]
    names += [hooks.name for hooks in beside]
    ordinal = max((n for taken, n in names if taken == prefix), default=-1) + 1
    if not elastic():  # a rank that joins late constructs its optimizer alone
        ordinal = agree(plan, ordinal, TorchOps(), collective, **agreed)
    return prefix, ordinal


def _compressor_of(
    optimizer: Any,
    names: Mapping[Tensor, str],
    plan: Plan,
    rule: Rule | None,
    name: tuple[str, int],
    collective: Timed[Tensor],
) -> StepRunner[Tensor]:
    """Select the exchange of a plan, and allocate memory."""
    ops, held, followers = TorchOps(), weakref.ref(optimizer), None
    exchange, full = exchange_of(plan, ops, collective), f"{name[0]}.{name[1]}"
    if rule is not None:
        followers = Tracker(rule, ops, lambda: moments(held(), names))
    shared = plan, ops, PayloadCodec(ops), exchange, full, collective.timer
    made = StepRunner(*shared, followers)
    made.rates = settings.optimizer_rates(optimizer, plan.config, names)
    made.frozen = partial(settings.frozen, held, names)
    log.info("TopKEF %s: %s, %s", full, plan.summary(), describe(exchange))
    return made
