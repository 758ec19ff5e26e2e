"""Error feedback of one DistributedDataParallel model: it exchanges the gradients of DDP's buckets.

During backward DDP calls a hook with each of its own buckets, in an order that is equal on all
ranks, and waits for a future of each at the end. The plan's buckets depend only on the parameters,
so that residuals keep their layout when DDP rebuilds its buckets. The last gradient of a bucket
launches it, inside DDP's hook; no hook waits.

A callback finishes exchanges at the end of backward, in the thread that called backward, before
DDP's own callback waits for the futures. A callback of the collective's own future (`then`) would
run in a thread of the backend. If an exchange has several collectives, ranks would start the later
ones in different orders, and block the thread that has to complete them (pytorch issue 48478).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from horovod_topk import reporting
from horovod_topk.core.run.base_compressor import BaseCompressor
from horovod_topk.ddp.hooks import Hooks
from horovod_topk.ddp.refusals import check_trained
from horovod_topk.errors import ConfigError
from horovod_topk.torch_training import specs
from horovod_topk.torch_training.collective import GroupCollective
from horovod_topk.torch_training.copies import CopiedState, OfOneModel
from horovod_topk.torch_training.momentum import check_not_twice
from horovod_topk.torch_training.replacing import REWRAP, check_inherits, inherited
from horovod_topk.torch_training.stepping import check_optimizer
from horovod_topk.torch_training.tracing import untraced


class DDPState(CopiedState):
    """State of one model's communication hook, as `TopKEF.of(model)` returns it.

    A copy of it, as in a pickled model, exchanges nothing: PyTorch does not register hooks again,
    and `OfOneModel` keeps the copied model from training.

    Args:
        model: the model, without a communication hook.
        optimizer: the optimizer of its parameters.
        compressor: the compressor with the settings.
        groups: lists of parameters that are sent together.
        before: the state of the optimizer that is replaced, if there is one.
    """

    hooks = Hooks
    _hooks: Hooks

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: Any,
        compressor: BaseCompressor,
        groups: Sequence[Sequence[Tensor]] | None = None,
        before: DDPState | None = None,
    ) -> None:
        names = specs.trained_names(model.module, model.parameters_to_ignore)
        label = f"a {type(model.module).__name__} with {len(names)} parameters"
        ranks = SimpleNamespace(included=lambda: True, size=model.process_group.size)
        super().__init__(optimizer, names, ranks, label)
        check_optimizer(optimizer, names)
        self._model = weakref.ref(model)
        self._futures: list[tuple[Future[Tensor], Tensor]] = []  # DDP waits for them
        self._failed: BaseException | None = None  # to be raised at the end of backward
        config = compressor.config
        if not self.active:
            check_not_twice(optimizer, config.momentum, nesterov=config.nesterov)
            self._leave(optimizer, config)
            return
        if before is None:
            check_trained(model, names)
        else:
            changed = {*names.values()} ^ {*before._names.values()}
            check_inherits(before._compressor.config, config, changed)
        config = self._fit_settings(optimizer, config, compressor.deferred)
        plan = specs.plan_of(optimizer, names, config, "average", groups or ())
        self._attach(optimizer, plan, GroupCollective(model.process_group), compressor.grad_scaler)
        if before is not None:
            self.load_state_dict(inherited(before._compressor, self.state_dict()))
        self._watch(optimizer, ((p, specs.accumulation_of(p)) for p in names))
        self._hooks.is_registered = partial(_has_hook, self._model)
        model.join_hook = OfOneModel(model)  # type: ignore[method-assign]

    def detach(self) -> None:
        """As `TrainingState.detach`."""
        super().detach()
        vars(self._model()).pop("join_hook", None)

    def replace(
        self,
        model: DistributedDataParallel,
        optimizer: Any,
        compressor: BaseCompressor,
        groups: Sequence[Sequence[Tensor]] | None = None,
    ) -> None:
        """Compress for another optimizer from the next backward on; see `inherited`.

        DDP can register no second hook, so this object takes over the content of a new state.

        Raises:
            ConfigError, StateDictError, PlanMismatchError: as `attach`; nothing has changed.
        """
        if optimizer is self._optimizer():
            raise ConfigError(
                "compression is attached to this model and this optimizer already",
                cure=f"Pass a new optimizer to replace this one, or {REWRAP}",
            )
        new = DDPState(model, optimizer, compressor, groups, before=self)
        if self.active:
            self._drop_step()
            self._hooks.remove()
            new._compressor.callbacks += self._compressor.callbacks
        vars(self).update(vars(new))

    def take(self, bucket: Any) -> Future[Tensor]:
        """Note the ready gradients of DDP's bucket; launch buckets that are complete with them.

        An error is raised at the end of backward: DDP cannot go on after an error in a hook.
        """
        self.check_is_no_copy()
        buffer = bucket.buffer()
        future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
        if not self.active:
            future.set_result(buffer)
            return future
        if bucket.index() == 0 and self._futures:  # of a backward that did not end
            self._drop_step()
            self._failed = None
        self._futures.append((future, buffer))
        with self._failing_later(), torch.no_grad():
            self._hooks.others.check_is_alive()
            for p, gradient in specs.gradients_in(buffer, bucket.parameters()):
                slot = self._buckets.slots.get(id(p))  # None: frozen when compression was attached
                if slot is not None and self._buckets.add(slot, gradient, gradient):
                    self._launch(slot.ordinal)
        if bucket.is_last():
            self._end_backward()
        return future

    @contextmanager
    def _failing_later(self) -> Iterator[None]:
        """Catch the first error, to raise it at the end of backward."""
        try:
            yield
        except BaseException as error:
            self._failed = self._failed or error

    def _launch(self, ordinal: int) -> None:
        gradients = self._buckets.ready(ordinal)
        if self._preprocessing is not None:
            self._preprocess(self._preprocessing, ordinal, gradients)
        self._compressor.launch(ordinal, gradients)

    def _end_backward(self) -> None:
        """Finish exchanges at the end of backward.

        In the first backward of a static graph this is at once: DDP calls its hooks at the end.
        """
        model: Any = self._model()
        if model.static_graph and not self._buckets.exchanges:
            self._finish()
        else:
            Variable._execution_engine.queue_callback(self._finish)

    @untraced
    @torch.no_grad()
    def _finish(self) -> None:
        """Write exchanged gradients to DDP's buckets, and complete the futures DDP waits for."""
        with self._failing_later(), reporting.waiting():
            if self._failed is None:
                self._decode()
        futures = self._futures
        if self._failed is not None:
            self._drop_step()
            for _, buffer in futures:
                buffer.fill_(math.nan)
        self._futures = []
        for future, buffer in futures:
            future.set_result(buffer)
        Variable._execution_engine.queue_callback(self._handed_out)

    def _decode(self) -> None:
        step, gain = self._compressor.step, 1.0
        if self._preprocessing is not None:
            gain = self._preprocessing.gain(self._optimizer())
        for ordinal in [bucket.ordinal for bucket in self._compressor.plan.buckets]:
            step.finish(ordinal, self._buckets.ready(ordinal), gain)
            self._buckets.note_exchanged(ordinal)

    @untraced
    @torch.no_grad()
    def _handed_out(self) -> None:
        """Raise a kept error, or note exchanged gradients, once DDP has copied its buckets back."""
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed
        self._buckets.hand_out_rest()
        self._hooks.exchanged()

    def _drop_step(self) -> None:
        """As `TrainingState._drop_step`."""
        if self.active:
            self._compressor.abandon()
            self._buckets.forget()
            self._futures = []


def _has_hook(model: weakref.ref[DistributedDataParallel]) -> bool:
    """Whether PyTorch calls the hook of a state with a model's gradients."""
    states = [state for _, state in getattr(model(), "_comm_hooks", ())]
    return any(isinstance(state, DDPState) and not state.is_copy for state in states)
