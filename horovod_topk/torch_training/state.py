"""Error feedback of one PyTorch optimizer, as the adapters of Horovod and torch DDP share it.

An adapter chooses the gradients and the collective, notes when each gradient is ready, and writes
the exchanged gradients back. All other parts of a step are here.
"""

from __future__ import annotations

import abc
import logging
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from horovod_topk.core.codec.payload_codec import PayloadCodec
from horovod_topk.core.exchange.agreement import agree
from horovod_topk.core.exchange.membership import check_elastic, elastic
from horovod_topk.core.exchange.selection import exchange_of
from horovod_topk.core.plan.buckets import Plan
from horovod_topk.core.run.attached import Attached
from horovod_topk.core.run.compressor import Compressor
from horovod_topk.core.run.optimizers import guarded
from horovod_topk.core.run.stats import Stats, describe
from horovod_topk.core.run.timing import Timed
from horovod_topk.methods.protocol import Method
from horovod_topk.ops.torch import TorchOps
from horovod_topk.torch_training.buckets import Buckets
from horovod_topk.torch_training.clipping import clip_alone
from horovod_topk.torch_training.hooks import Hooks
from horovod_topk.torch_training.momentum import advise, fit_momentum, hand_over
from horovod_topk.torch_training.preprocessing import ExchangesOwn, Phase, Preprocessing
from horovod_topk.torch_training.rates import followed, why_not_followed
from horovod_topk.torch_training.scaling import Scaler
from horovod_topk.torch_training.stepping import check_evaluates_once, frozen
from horovod_topk.torch_training.updates import Updates, moments
from horovod_topk.torch_training.wrappers import check_has_hooks
from horovod_topk.updates.tracker import Rule, Tracker

log = logging.getLogger("horovod_topk")

_LIVE: weakref.WeakSet[TrainingState] = weakref.WeakSet()


def live_states() -> list[TrainingState]:
    """States of all optimizers in this process whose gradients are compressed."""
    return list(_LIVE)


class TrainingState(Attached[Compressor[Tensor]], abc.ABC):
    """Error feedback of one optimizer; `Attached` has the methods for users.

    Args:
        optimizer: the optimizer of the gradients.
        names: names of parameters; parameters without one are not compressed.
        ranks: Horovod's process set, or an object with its methods.
        label: name of the optimizer in messages.
    """

    framework = "torch"
    hooks: ClassVar[type[Hooks]]  # the adapter's hooks on the optimizer

    def __init__(self, optimizer: Any, names: Mapping[Tensor, str], ranks: Any, label: str) -> None:
        check_has_hooks(optimizer)
        super().__init__(ranks, "average", label)
        self._optimizer = weakref.ref(optimizer)
        self._names = names
        self._buckets = Buckets(names)
        self._advice: tuple[str, ...] = ()  # warnings about the optimizer
        self._rule: Rule | None = None  # by which the optimizer's steps are adapted

    def _fit_settings(self, optimizer: Any, config: Method, deferred: Mapping[str, str]) -> Method:
        """Fill in the settings that depend on the optimizer.

        Raises:
            ConfigError, UnsupportedOperationError: the settings do not fit the optimizer.
        """
        check_elastic(config)
        check_evaluates_once(optimizer)
        config, self._rule = fit_momentum(optimizer, config, deferred)
        config = guarded(config, deferred)
        if "follow_lr" in deferred:
            why = why_not_followed(optimizer)
            config = replace(config, follow_lr=not why)
            if why:
                log.info("TopKEF does not follow learning rates: %s", why)
        if isinstance(optimizer, ExchangesOwn):
            config = optimizer.exchange_settings(config, self._names)
        if self._rule is None:
            self._advice = advise(optimizer, config, is_auto="momentum" in deferred)
        return config

    def _attach(
        self,
        optimizer: Any,
        plan: Plan,
        collective: Timed[Tensor],
        grad_scaler: Scaler | None,
    ) -> None:
        """Agree with all ranks on the plan of an optimizer's gradients, and allocate memory.

        Raises:
            PlanMismatchError, ConfigError: ranks have different plans, or the exchange cannot be
                used here.
        """
        config, plan = plan.config, plan.under(plan.config, self._rule)
        self._preprocessing = Preprocessing.of(grad_scaler, plan, optimizer)
        self._has_scaler = grad_scaler is not None
        ops = TorchOps()
        self._prefix = config.name or f"topkef.{plan.digest.hex()}"
        self._ordinal = _free_ordinal(self._prefix)
        if not elastic():  # a rank that joins late constructs its optimizer alone
            self._ordinal = agree(plan, self._ordinal, ops, collective)
        exchange = exchange_of(plan, ops, collective)
        name = f"{self._prefix}.{self._ordinal}"
        follow = None
        if self._rule is not None:
            follow = Tracker(
                self._rule, ops, lambda: moments(self._optimizer(), self._names)
            ).follow
        self._compressor = self._state = Compressor(
            plan, ops, PayloadCodec(ops), exchange, name, collective.timer, follow
        )
        self._compressor.rates = followed(optimizer, config, self._names)
        self._compressor.frozen = self._frozen
        self._reduction = plan.reduction
        self._buckets.index(plan)
        self._skipped |= plan.sent_dense()
        log.info("TopKEF %s: %s, %s", name, plan.summary(), describe(exchange))

    def _watch(self, optimizer: Any, accumulations: Any) -> None:
        """Register hooks on the optimizer's steps; for `accumulations` see `Hooks.watch`."""
        compressor: Compressor[Tensor] = self._compressor
        updates = None
        if self._rule is not None:
            updates = Updates(self._names, lambda: compressor)
        shared = compressor, self._buckets, updates
        self._hooks = type(self).hooks(*shared, has_scaler=self._has_scaler)
        try:
            self._hooks.watch(optimizer, accumulations)
        except BaseException:
            self._hooks.remove()
            raise
        _LIVE.add(self)

    def detach(self) -> None:
        """Remove all hooks from optimizer and gradients, as the adapter could not begin."""
        if not self.active:
            for handle in self._handles_alone:
                handle.remove()
            return
        self._hooks.remove()
        _LIVE.discard(self)

    def _leave(
        self,
        optimizer: Any,
        config: Method,
        gradients: Callable[[], Sequence[Tensor]] | None = None,
    ) -> None:
        """Apply momentum and clipping to an optimizer that exchanges nothing.

        gradients: passed to `clip_alone`.
        """
        self._handles_alone = [hand_over(optimizer, config.momentum, nesterov=config.nesterov)]
        if config.clip_norm is not None:
            self._handles_alone.append(clip_alone(optimizer, config.clip_norm, gradients))

    def _frozen(self) -> Collection[str]:
        """Names of the tensors that the optimizer does not move now."""
        optimizer = self._optimizer()
        return () if optimizer is None else frozen(optimizer, self._names)

    # Methods for users.

    @torch.no_grad()
    def stats(self) -> Stats:
        """As `Attached.stats`."""
        if self.active:
            self.warnings = (*self._advice, *self._hooks.warnings)
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

    # Methods that an adapter calls when gradients are ready.

    def _preprocess(self, by: Preprocessing, ordinal: int, gradients: list[Tensor]) -> None:
        """Unscale and clip a bucket's gradients, in place."""
        if not (own := self._compressor).step.sent:
            by.begin(self._optimizer(), own.ranks, Phase(own.counter.committed, own.ratio))
        slots = self._buckets.slots_of(ordinal)
        by.apply([slot.parameter for slot in slots], gradients)
        for slot in slots:
            slot.note_writing()

    @abc.abstractmethod
    def _drop_step(self) -> None:
        """Discard a step that has begun, with its exchanged gradients."""


def _free_ordinal(prefix: str) -> int:
    """Smallest ordinal above those of all live optimizers with the same prefix."""
    taken = (state._ordinal for state in live_states() if state._prefix == prefix)
    return max(taken, default=-1) + 1
