"""Error feedback of one Horovod optimizer: it takes ready gradients and returns exchanged ones.

Horovod calls `ready` from a parameter's hook, or from `synchronize()` if the hook did not fire. In
`synchronize()` it calls the function that `ready` has returned, once for each parameter. The last
gradient of a bucket launches the bucket; the first of these functions waits for it. No hook blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from horovod_topk.core.exchange.membership import check_steps_kept, elastic
from horovod_topk.methods.protocol import Method
from horovod_topk.torch.collective import HorovodCollective
from horovod_topk.torch.hooks import Hooks
from horovod_topk.torch.planning import plan_of
from horovod_topk.torch.sparse import check_may_leave, values_alone
from horovod_topk.torch_training.momentum import check_not_twice
from horovod_topk.torch_training.ready import Slot, first_elements
from horovod_topk.torch_training.scaling import Scaler
from horovod_topk.torch_training.state import TrainingState
from horovod_topk.torch_training.tracing import untraced

log = logging.getLogger("horovod_topk")


class OptimizerState(TrainingState):
    """State of one distributed optimizer, as `TopKEF.of(optimizer)` returns it."""

    hooks = Hooks

    def __init__(
        self,
        optimizer: Any,
        config: Method,
        grad_scaler: Scaler | None = None,
        deferred: Mapping[str, str] | None = None,
    ) -> None:
        names = optimizer._parameter_names
        label = f"{type(optimizer).__name__} with {len(names)} parameters"
        super().__init__(optimizer, names, optimizer.process_set, label)
        self._late_are_checked = False  # whether `synchronize()` has checked late gradients
        self._handles = optimizer._handles
        self._is_elastic = elastic()
        if not self.active:
            check_not_twice(optimizer, config.momentum, nesterov=config.nesterov)
            self._config = config
            return
        config = self._fit_settings(optimizer, config, deferred or {})
        if self._rule is not None:
            optimizer.sparse_as_dense = True  # Horovod would exchange sparse ones without momentum
        collective = HorovodCollective(optimizer.process_set)
        self._attach(optimizer, plan_of(optimizer, config), collective, grad_scaler)

    def begin(self, register_hooks: Callable[[], None] | None) -> None:
        """Register hooks on the optimizer, after all checks have passed.

        register_hooks: registers Horovod's own hooks on parameters; None: it exchanges nothing.
        """
        optimizer: Any = self._optimizer()
        if self.active:
            optimizer._groups = None  # buckets replace groups, with one hook a parameter
        if register_hooks is not None:
            register_hooks()
        if self.active:
            groups = (group["params"] for group in optimizer.param_groups)
            trained = [p for group in groups for p in group if p.requires_grad]
            try:
                self._watch(optimizer, zip(trained, optimizer._grad_accs, strict=True))
            except BaseException:
                optimizer._grad_accs.clear()  # and with them Horovod's hooks
                raise
            return
        norm = self._config.clip_norm
        gradients = None if norm is None else partial(values_alone, optimizer, norm)
        self._leave(optimizer, self._config, gradients)

    # Methods that Horovod calls on a compressor, for gradients that are not compressed here.

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, None]:
        """Return the tensor as it is."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: None) -> Tensor:
        """Return the tensor as it is."""
        return tensor

    # Methods that the patched optimizer and its hooks call.

    @untraced
    def ready(self, p: Tensor) -> Callable[[], Tensor] | None:
        """Note that a parameter's gradient is ready; launch its bucket if it was the last.

        Returns:
            A function that waits and returns the exchanged gradient; None: Horovod itself has to
            exchange this gradient.

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
        """Return the exchanged gradient of a parameter; the first call waits for its bucket."""
        ordinal, step, gain = slot.ordinal, self._compressor.step, 1.0
        if slot.exchanged is None or ordinal in step.sent:
            with torch.no_grad():
                if self._preprocessing is not None:
                    gain = self._preprocessing.gain(self._optimizer())
                step.finish(ordinal, self._buckets.gradients(ordinal), gain)
            self._buckets.note_exchanged(ordinal)
            self._late_are_checked = False
        assert slot.exchanged is not None  # its bucket is finished
        return slot.exchanged.dense

    def synchronized(self) -> None:
        """Note that `synchronize()` has ended, so that a user may change gradients from now on."""
        self._hooks.exchanged()

    @torch.no_grad()
    def _launch(self, ordinal: int) -> None:
        if self._is_elastic and not self._compressor.step.sent:
            self._meet()
        self._buckets.sent.pop(ordinal, None)
        gradients = self._buckets.gradients(ordinal)
        if self._preprocessing is not None:
            self._preprocess(self._preprocessing, ordinal, gradients)
        self._buckets.sent[ordinal] = first_elements(gradients)
        self._compressor.launch(ordinal, gradients)

    def _meet(self) -> None:
        """Rescale residuals before a step if the number of ranks has changed."""
        units, ranks = self._compressor.ranks_before, self._compressor.ranks
        check_steps_kept(self._compressor.plan.config, self.manager)
        if self.manager is not None and self.manager.units != ranks:
            self.manager.reconcile()
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
        """Discard a step that has begun, as Horovod does in `optimizer.load_state_dict()`."""
        optimizer: Any = self._optimizer()
        if not self.active:
            return
        if optimizer._handles:
            optimizer._handles = {}
            for p in optimizer._allreduce_delay:
                optimizer._allreduce_delay[p] = optimizer.backward_passes_per_step
        self._forget_step(optimizer)

    def _forget_step(self, optimizer: Any) -> None:
        """Forget the gradients and handles of a step that will not be finished."""
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
        """Refuse late sparse gradients before `synchronize()` sends; see `Buckets.check_late`."""
        if not optimizer.sparse_as_dense:
            for slot in self._buckets.late_sparse():
                check_may_leave(slot.spec.name, self._compressor)
