"""Error feedback of one Horovod optimizer: it takes ready gradients and returns exchanged ones.

Horovod calls `ready` from a parameter's hook, or from `synchronize()` if the hook did not fire. In
`synchronize()` it calls the function that `ready` has returned, once for each parameter. The last
gradient of a bucket launches the bucket; the first of these functions waits for it. No hook blocks.

A sparse gradient is left to Horovod's allgather if no setting or residual forbids it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch.optimizer import split_list
from torch import Tensor

from horovod_topk.core.exchange.membership import check_steps_kept, elastic
from horovod_topk.core.run.runner import StepRunner
from horovod_topk.core.run.seams import reduction_of
from horovod_topk.errors import ConfigError, ShapeChangedError
from horovod_topk.torch.collective import HorovodCollective
from horovod_topk.torch.hooks import Hooks
from horovod_topk.torch_training.gradients import Slot, first_elements
from horovod_topk.torch_training.state import TrainingCompressor, TrainingState
from horovod_topk.torch_training.tracing import untraced

log = logging.getLogger("horovod_topk")


class OptimizerState(TrainingState):
    """State of one distributed optimizer, as `TopKEF.of(optimizer)` returns it.

    Args:
        optimizer: the optimizer, whose private attributes Horovod's constructor has set.
    """

    hooks = Hooks

    def __init__(self, optimizer: Any, compressor: TrainingCompressor) -> None:
        names = optimizer._parameter_names
        label = f"{type(optimizer).__name__} with {len(names)} parameters"
        super().__init__([optimizer], optimizer.process_set, label)
        self._late_are_checked = False  # whether `synchronize()` has checked late gradients
        self._handles = optimizer._handles
        self._is_elastic = elastic()
        if not self.active:
            norm = compressor.config.clip_norm
            gradients = None if norm is None else partial(_values_alone, optimizer, norm)
            self._leave(optimizer, compressor.config, gradients)
            return
        collective = HorovodCollective(optimizer.process_set)
        reduction, groups = reduction_of(optimizer.op, hvd), _asked_groups(optimizer)
        hooks = self._hooks_for(optimizer, names, compressor, collective, reduction, groups)
        if hooks.updates is not None:
            optimizer.sparse_as_dense = True  # Horovod would exchange sparse ones without momentum
        self._use(hooks)
        self._hooks, self._buckets = hooks, hooks.buckets

    def begin(self, optimizer: Any, register_hooks: Callable[[], None] | None) -> None:
        """Register hooks on the optimizer, after all checks have passed.

        register_hooks: registers Horovod's own hooks on parameters; None: it exchanges nothing.
        """
        if self.active:
            optimizer._groups = None  # buckets replace groups, with one hook a parameter
        if register_hooks is not None:
            register_hooks()
        if not self.active:
            return
        try:
            accumulations = zip(_trained(optimizer), optimizer._grad_accs, strict=True)
            self._watch(self._hooks, optimizer, accumulations)
        except BaseException:
            optimizer._grad_accs.clear()  # and with them Horovod's hooks
            raise

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
    def ready(self, optimizer: Any, p: Tensor) -> Callable[[], Tensor] | None:
        """Note that a parameter's gradient is ready; launch its bucket if it was the last.

        Returns:
            A function that waits and returns the exchanged gradient; None: Horovod itself has to
            exchange this gradient.
        """
        slot = self._buckets.slots.get(id(p)) if self.active else None
        if slot is None:
            return None
        if self._handles is not optimizer._handles:  # `optimizer.load_state_dict()` has cut off
            self._compressor.abandon()
            self._forget_step(optimizer)
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
        """Return the exchanged gradient of a parameter; the first call waits for all buckets."""
        ordinal, step, gain = slot.ordinal, self._compressor.step, 1.0
        if slot.exchanged is None or ordinal in step.sent:
            with torch.no_grad():
                if (by := self._hooks.preprocessing) is not None:
                    gain = by.gain(self._hooks.optimizer())
                ordinals = sorted({ordinal, *step.sent})
                step.finish({each: self._buckets.gradients(each) for each in ordinals}, gain)
            for each in ordinals:
                self._buckets.note_exchanged(each)
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
        if self._hooks.preprocessing is not None:
            self._hooks.preprocess(ordinal, gradients)
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

    def _drop_step(self) -> None:
        """Discard a step that has begun, as Horovod does in `optimizer.load_state_dict()`."""
        if not self.active:
            return
        optimizer = self._hooks.optimizer()
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
        name = slot.spec.name
        _check_may_leave(name, self._compressor)
        self._compressor.rollback()
        self._buckets.forget_exchanged()
        plan = self._compressor.plan.without(name)
        self._compressor.replan(plan)
        self._buckets.index(plan)
        self._skip(name, "sparse gradient: exchanged by Horovod's own allgather")
        if self._buckets.is_complete(slot.ordinal):
            self._launch(slot.ordinal)

    def _check_late_sparse(self, optimizer: Any) -> None:
        """Refuse late sparse gradients before `synchronize()` sends; see `Buckets.check_late`."""
        if not optimizer.sparse_as_dense:
            for slot in self._buckets.slots.values():
                gradient = slot.parameter.grad
                if not slot.ready and gradient is not None and gradient.is_sparse:
                    _check_may_leave(slot.spec.name, self._compressor)


def _asked_groups(optimizer: Any) -> Iterator[Sequence[Tensor]]:
    """The user's `groups=` as lists of parameters; Horovod splits them if it is a number."""
    if isinstance(optimizer._groups, list):
        yield from optimizer._groups
    elif optimizer._groups is not None:
        yield from split_list(_trained(optimizer), optimizer._groups)


def _trained(optimizer: Any) -> list[Tensor]:
    groups = (group["params"] for group in optimizer.param_groups)
    return [p for parameters in groups for p in parameters if p.requires_grad]


# Sparse gradients.


def _check_may_leave(name: str, compressor: StepRunner[Tensor]) -> None:
    """Refuse a sparse gradient to which a setting would not apply, or with a residual."""
    config = compressor.plan.config
    if config.momentum:
        raise _refused(f"momentum={config.momentum}", name)
    if config.clip_norm is not None:
        raise _refused(f"clip_norm={config.clip_norm}", name)
    norm = compressor.norm_of(name)
    if norm > 0.0:
        raise ShapeChangedError(
            f"its gradient became sparse, and a residual of norm {norm:.3g} would be lost",
            tensor=name,
            cure="Pass sparse_as_dense=True to hvd.DistributedOptimizer",
        )


def _refused(setting: str, tensor: str) -> ConfigError:
    """The error for a setting that would have no effect on a sparse gradient."""
    return ConfigError(
        f"its gradient is sparse, and {setting} is for gradients that are compressed: Horovod "
        "would exchange this one as it is",
        tensor=tensor,
        cure="Pass sparse_as_dense=True to hvd.DistributedOptimizer, or sparse=False to the layer",
    )


def _values_alone(optimizer: Any, clip_norm: float) -> list[Tensor]:
    """Dense gradients and the values of sparse ones, to be clipped where nothing is exchanged.

    Sparse gradients count like their dense copies with `sparse_as_dense`.
    """
    found = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    for p in found:
        if p.grad.is_sparse and not optimizer.sparse_as_dense:
            name = optimizer._parameter_names.get(p, f"of shape {list(p.shape)}")
            raise _refused(f"clip_norm={clip_norm}", name)
    for p in found:
        if p.grad.is_sparse:
            p.grad = p.grad.coalesce()  # add up duplicate indices before the norm
    return [p.grad._values() if p.grad.is_sparse else p.grad for p in found]
