"""Error feedback behind one Horovod optimizer: which gradients are ready, and what they become.

Horovod calls `ready` from a parameter's hook, or from `synchronize()` where the hook did not
fire, and what it returns once a parameter in `synchronize()`. The last gradient of a bucket
launches it; the first collection waits for it. Nothing in a hook blocks.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from horovod_topk.core.agreement import agree
from horovod_topk.core.attached import Attached
from horovod_topk.core.base_compressor import check_elastic, check_steps_kept, elastic
from horovod_topk.core.codec import PayloadCodec
from horovod_topk.core.compressor import Compressor
from horovod_topk.core.exchange.selection import exchange_of
from horovod_topk.core.momentum import Momenta
from horovod_topk.core.probe import Probe
from horovod_topk.core.stats import Stats, describe
from horovod_topk.core.timing import StepTimer
from horovod_topk.methods.protocol import Method
from horovod_topk.ops.torch import TorchOps
from horovod_topk.torch.buckets import Buckets
from horovod_topk.torch.clipping import clip_alone
from horovod_topk.torch.collective import HorovodCollective
from horovod_topk.torch.hooks import Hooks
from horovod_topk.torch.momentum import (
    Loan,
    advise,
    check_not_twice,
    hand_over,
    settle_momentum,
)
from horovod_topk.torch.planning import plan_of
from horovod_topk.torch.preprocessing import Preprocessing
from horovod_topk.torch.rates import followed, has_rates
from horovod_topk.torch.ready import Slot, first_elements
from horovod_topk.torch.scaling import Scaler
from horovod_topk.torch.sparse import check_may_leave
from horovod_topk.torch.stepping import check_evaluates_once

log = logging.getLogger("horovod_topk")

_LIVE: weakref.WeakSet[OptimizerState] = weakref.WeakSet()


def live_states() -> list[OptimizerState]:
    """The states of all optimizers that exist in this process."""
    return list(_LIVE)


class OptimizerState(Attached[Compressor[Tensor]]):
    """What `TopKEF.of(optimizer)` returns. One for each distributed optimizer."""

    framework = "torch"

    def __init__(
        self,
        optimizer: Any,
        config: Method,
        grad_scaler: Scaler | None = None,
        deferred: Mapping[str, str] | None = None,
    ) -> None:
        deferred = deferred or {}
        parameters = optimizer._parameter_names
        label = f"{type(optimizer).__name__} with {len(parameters)} parameters"
        super().__init__(optimizer.process_set, "average", label)
        self._optimizer = weakref.ref(optimizer)
        self._buckets = Buckets(parameters)
        self._late_are_checked = False  # in the present synchronize()
        self._handles = optimizer._handles
        if not self.active:
            check_not_twice(optimizer, config.momentum, nesterov=config.nesterov)
            self._config = config
            return
        check_elastic(config)
        check_evaluates_once(optimizer)
        config = settle_momentum(optimizer, config, deferred)
        if "follow_lr" in deferred:
            config = replace(config, follow_lr=has_rates(optimizer))
        self._loan = None
        if config.taken_over:
            self._loan = Loan(optimizer, parameters)
            optimizer.sparse_as_dense = True  # else Horovod would exchange them, without momentum
        advise(optimizer, config)
        self._attach(optimizer, config, grad_scaler)

    def _attach(self, optimizer: Any, config: Method, grad_scaler: Scaler | None) -> None:
        """Plan the exchange of an optimizer's gradients, with all ranks."""
        plan = plan_of(optimizer, config)
        self._preprocessing = Preprocessing.of(grad_scaler, plan)
        self._has_scaler = grad_scaler is not None
        timer = StepTimer()
        collective = HorovodCollective(optimizer.process_set, timer)
        ops = TorchOps()
        self._prefix = config.name or f"topkef.{plan.digest.hex()}"
        self._ordinal = _free_ordinal(self._prefix)
        self._is_elastic = elastic()
        if not self._is_elastic:  # there, ranks that join late construct theirs alone
            self._ordinal = agree(plan, self._ordinal, ops, collective)
        exchange = exchange_of(plan, ops, collective)
        name = f"{self._prefix}.{self._ordinal}"
        momenta = Momenta(plan.config, None if self._loan is None else self._loan.now)
        self._compressor = self._state = Compressor(
            plan, ops, PayloadCodec(ops), exchange, name, momenta, timer
        )
        if config.probe_every is not None:
            self._compressor.probe = Probe(config.probe_every, collective, ops, name)
        self._compressor.rates = followed(optimizer, config, self._loan)
        self._reduction = plan.reduction
        self._buckets.index(plan)
        self._skipped |= plan.sent_dense()
        log.info("TopKEF %s: %s, %s", name, plan.summary(), describe(exchange))

    def begin(self, register_hooks: Callable[[], None] | None) -> None:
        """Take part in the optimizer's steps, now that nothing can be refused any more.

        register_hooks: Horovod's own way to put its hooks on parameters, where it exchanges.
        """
        optimizer: Any = self._optimizer()
        if self.active:
            optimizer._groups = None  # from here on a bucket is the unit, one hook a parameter
        if register_hooks is not None:
            register_hooks()
        if self.active:
            shared = self._compressor, self._buckets, self._loan
            self._hooks = Hooks(*shared, has_scaler=self._has_scaler)
            self._hooks.watch(optimizer)
            _LIVE.add(self)
        else:
            self._leave(optimizer)

    def _leave(self, optimizer: Any) -> None:
        """Have an optimizer that exchanges nothing do by itself what is asked for all the same."""
        config = self._config
        hand_over(optimizer, config.momentum, nesterov=config.nesterov)
        if config.clip_norm is not None:
            clip_alone(optimizer, config.clip_norm)

    # What Horovod's own path asks of a compressor, for gradients that are not ours.

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, None]:
        """Return the tensor as it is."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: None) -> Tensor:
        """Return the tensor as it is."""
        return tensor

    # What a user may ask.

    @torch.no_grad()
    def stats(self) -> Stats:
        """As `Attached.stats`."""
        if self.active:
            self.warnings = self._hooks.warnings
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

    # What the seam and the optimizer's hooks call.

    def ready(self, p: Tensor) -> Callable[[], Tensor] | None:
        """Note that a parameter's gradient is ready; launch its bucket if it was the last.

        Returns:
            A function that waits and returns the exchanged gradient, or None where Horovod's own
            path has to take this gradient.

        Raises:
            ShapeChangedError, GradientChangedError, RepeatedSynchronizeError, ConfigError.
        """
        slot = self._buckets.slots.get(id(p))
        if slot is None:
            return None
        optimizer: Any = self._optimizer()
        if self._handles is not optimizer._handles:
            self._forget_abandoned(optimizer)
        fired = optimizer._allreduce_delay[p] == 0
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        gradient, is_sparse = p.grad, p.grad.is_sparse
        if not fired and not self._late_are_checked:
            self._buckets.check_late(self._compressor.step.sent)
            self._check_late_sparse(optimizer)
            self._late_are_checked = True
        if is_sparse and not optimizer.sparse_as_dense:
            self._release(slot)
            return None
        dense = gradient.to_dense() if is_sparse else gradient
        is_complete = self._buckets.add(slot, gradient, dense)
        if not fired:
            self._late[slot.spec.name] += 1
        if is_complete:
            self._launch(slot.ordinal)
        return partial(self._collect, slot)

    def _collect(self, slot: Slot) -> Tensor:
        """The exchanged gradient of a parameter; the first of a bucket waits for all of it."""
        ordinal, step, gain = slot.ordinal, self._compressor.step, 1.0
        if slot.exchanged is None or ordinal in step.sent:
            with torch.no_grad():
                if self._preprocessing is not None:
                    gain = self._preprocessing.gain(self._optimizer())
                targets = self._buckets.gradients(ordinal)
                timer, began = self._compressor.timer, time.perf_counter()
                before = timer.exposed
                step.finish(ordinal, targets, gain)
                timer.decompressing += time.perf_counter() - began - (timer.exposed - before)
                if self._compressor.probe is not None:
                    self._compressor.probe.finish(ordinal, targets, gain)
            self._buckets.note_exchanged(ordinal)
            self._late_are_checked = False
        assert slot.exchanged is not None  # its bucket is finished
        return slot.exchanged.dense

    def synchronized(self) -> None:
        """Note that `synchronize()` is over: from here on a user may change gradients."""
        self._hooks.synchronized()

    @torch.no_grad()
    def _launch(self, ordinal: int) -> None:
        if self._is_elastic and not self._compressor.step.sent:
            self._meet()
        self._buckets.sent.pop(ordinal, None)
        gradients = self._buckets.gradients(ordinal)
        if self._preprocessing is not None:
            if not self._compressor.step.sent:
                self._preprocessing.begin(self._optimizer(), self._compressor.ranks)
            self._preprocessing.apply(gradients)
            for slot in self._buckets.slots_of(ordinal):
                slot.note_writing()
        self._buckets.sent[ordinal] = first_elements(gradients)
        self._compressor.launch(ordinal, gradients)

    def _meet(self) -> None:
        """Rescale residuals before a step, where ranks have come or gone unannounced."""
        units, ranks = self._compressor.ranks_before, self._compressor.ranks
        check_steps_kept(self._compressor.plan.config, self.manager)
        if self.manager is not None and self.manager.units != ranks:
            self.manager.settle()
        elif self.manager is None and units not in (None, ranks):
            log.warning(
                "TopKEF: %s has %d ranks instead of %d. Residuals of lost ranks are gone, and a "
                "commit has no residuals: pass compression= to hvd.elastic.TorchState",
                self.label,
                ranks,
                units,
            )

    def _forget_abandoned(self, optimizer: Any) -> None:
        """Drop a step that `optimizer.load_state_dict()` cut off: it replaces the handles."""
        self._compressor.abandon()
        self._forget_step(optimizer)

    def _drop_step(self) -> None:
        """Have nothing under way, as Horovod does in `optimizer.load_state_dict()`."""
        optimizer: Any = self._optimizer()
        if not self.active:
            return
        if optimizer._handles:
            optimizer._handles = {}
            for p in optimizer._allreduce_delay:
                optimizer._allreduce_delay[p] = optimizer.backward_passes_per_step
        self._forget_step(optimizer)

    def _forget_step(self, optimizer: Any) -> None:
        """Let go of what a step that never will be over has left behind."""
        self._handles = optimizer._handles
        self._buckets.forget()
        self._late_are_checked = False

    def _release(self, slot: Slot) -> None:
        """Leave a parameter with sparse gradients to Horovod, before its bucket is first sent."""
        check_may_leave(slot.spec.name, self._compressor)
        name = slot.spec.name
        self._compressor.rollback()
        self._buckets.forget_exchanged()
        plan = self._compressor.plan.without(name)
        self._compressor.replan(plan)
        self._buckets.index(plan)
        self._skip(name, "sparse gradient: exchanged by Horovod's own allgather")
        if slot.ordinal in self._buckets and self._buckets.is_complete(slot.ordinal):
            self._launch(slot.ordinal)

    def _check_late_sparse(self, optimizer: Any) -> None:
        """Refuse before `synchronize()` sends anything; see `Buckets.check_late`."""
        if not optimizer.sparse_as_dense:
            for slot in self._buckets.late_sparse():
                check_may_leave(slot.spec.name, self._compressor)


def _free_ordinal(prefix: str) -> int:
    """One above all live optimizers of the same prefix."""
    taken = (state._ordinal for state in live_states() if state._prefix == prefix)
    return max(taken, default=-1) + 1
