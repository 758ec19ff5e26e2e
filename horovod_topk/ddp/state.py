"""Error feedback behind one DistributedDataParallel: from ready gradients to exchanged ones.

During backward DDP hands over buckets of its own, in an order that is equal on all ranks, and waits
for a future of each at the end. The plan's buckets follow from parameters alone, so that residuals
stay where they are when DDP rebuilds its buckets. The last gradient of a bucket launches it, inside
DDP's hook; nothing in a hook waits.

Exchanges are finished by a callback at the end of backward, in the thread that called it, before
DDP's own callback waits for the futures. A callback of the collective's own future (`then`) would
run in a thread of the backend. There an exchange of several collectives would start the next ones
in an order of each rank's own, and block the thread that has to complete them (pytorch/pytorch
issue 48478).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from horovod_topk import reporting
from horovod_topk.core.base_compressor import BaseCompressor
from horovod_topk.ddp.collective import GroupCollective
from horovod_topk.ddp.hooks import Hooks
from horovod_topk.ddp.refusals import refuse_join
from horovod_topk.torch_training import specs
from horovod_topk.torch_training.copies import CopiedState
from horovod_topk.torch_training.momentum import check_not_twice
from horovod_topk.torch_training.stepping import check_optimizer


class DDPState(CopiedState):
    """What `TopKEF.of(model)` returns, and the state of the model's communication hook.

    A copy of it, as in a pickled model, exchanges nothing: PyTorch does not register hooks anew.

    Args:
        model: without a hook.
        optimizer: of its parameters.
        compressor: has the settings.
        groups: lists of parameters that are sent together.
    """

    hooks = Hooks

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: Any,
        compressor: BaseCompressor,
        groups: Sequence[Sequence[Tensor]] | None = None,
    ) -> None:
        names = specs.trained_names(model.module, model.parameters_to_ignore)
        label = f"a {type(model.module).__name__} with {len(names)} parameters"
        ranks = SimpleNamespace(included=lambda: True, size=model.process_group.size)
        super().__init__(optimizer, names, ranks, label)
        check_optimizer(optimizer, names)
        self._model = weakref.ref(model)
        self._futures: list[tuple[Future[Tensor], Tensor]] = []  # that DDP waits for
        self._failed: BaseException | None = None  # what is raised when backward is over
        config = compressor.config
        if not self.active:
            check_not_twice(optimizer, config.momentum, nesterov=config.nesterov)
            self._leave(optimizer, config)
            return
        config = self._settle(optimizer, config, compressor.deferred)
        plan = specs.plan_of(optimizer, names, config, "average", groups or ())
        self._attach(optimizer, plan, GroupCollective(model.process_group), compressor.grad_scaler)
        self._watch(optimizer, ((p, specs.accumulation_of(p)) for p in names))
        model.join_hook = refuse_join  # type: ignore[method-assign]

    def take(self, bucket: Any) -> Future[Tensor]:
        """Note gradients that DDP has ready; launch the buckets of which they are the last.

        An error is raised when backward is over, and DDP with it: it would not survive one here.
        """
        self.check_is_no_copy()
        buffer = bucket.buffer()
        future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
        if not self.active:
            future.set_result(buffer)
            return future
        if bucket.index() == 0 and self._futures:  # of a backward that was cut off
            self._drop_step()
            self._failed = None
        self._futures.append((future, buffer))
        with self._failing_later(), torch.no_grad():
            for p, gradient in specs.gradients_in(buffer, bucket.parameters()):
                slot = self._buckets.slots[id(p)]
                if self._buckets.add(slot, gradient, gradient):
                    self._launch(slot.ordinal)
        if bucket.is_last():
            self._end_backward()
        return future

    @contextmanager
    def _failing_later(self) -> Iterator[None]:
        """Keep the first error for the end of backward."""
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
        """Have exchanges finished when backward is over.

        That is now in the first backward of a static graph: DDP hands over its buckets at the end.
        """
        model: Any = self._model()
        if model.static_graph and not self._buckets.exchanges:
            self._finish()
        else:
            Variable._execution_engine.queue_callback(self._finish)

    @torch.no_grad()
    def _finish(self) -> None:
        """Decode every bucket into DDP's memory, and let DDP hand that out."""
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

    @torch.no_grad()
    def _handed_out(self) -> None:
        """DDP has handed out what was exchanged: raise what has failed, or note gradients."""
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
