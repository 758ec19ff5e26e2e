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

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd import Variable
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from horovod_topk import reporting
from horovod_topk.core.base_compressor import BaseCompressor
from horovod_topk.ddp.collective import GroupCollective
from horovod_topk.ddp.hooks import Hooks
from horovod_topk.ddp.refusals import check_optimizer, refuse_join
from horovod_topk.errors import NotAttachedError
from horovod_topk.torch_training.momentum import check_not_twice
from horovod_topk.torch_training.ready import Slot
from horovod_topk.torch_training.specs import plan_of
from horovod_topk.torch_training.state import TrainingState


class _Ranks:
    """The ranks of a process group, as Horovod's process sets answer."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def included(self) -> bool:
        """True: a model is built by the ranks of its group."""
        return True

    def size(self) -> int:
        """How many."""
        return dist.get_world_size(self._group)


class DDPState(TrainingState):
    """What `TopKEF.of(model)` returns, and the state of the model's communication hook.

    It pickles, with the model's `state_dict` or with the model, as a copy of the residuals that is
    `active` no more: PyTorch registers no hook anew. Attach a compressor to the model that was
    unpickled, and give `load_state_dict` what the copy's `state_dict()` returns.

    Args:
        model: without a hook.
        optimizer: of its parameters.
        compressor: has the settings.
        groups: lists of parameters that are sent together.
    """

    hooks = Hooks
    is_copy = False

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: Any,
        compressor: BaseCompressor,
        groups: Sequence[Sequence[Tensor]] | None = None,
    ) -> None:
        names = _names_of(model)
        label = f"a {type(model.module).__name__} with {len(names)} parameters"
        super().__init__(optimizer, names, _Ranks(model.process_group), label)
        check_optimizer(optimizer, names)
        self._model = weakref.ref(model)
        self._futures: list[tuple[Future[Tensor], Tensor]] = []  # that DDP waits for
        config = compressor.config
        if not self.active:
            check_not_twice(optimizer, config.momentum, nesterov=config.nesterov)
            self._leave(optimizer, config)
            return
        config = self._settle(optimizer, config, compressor.deferred)
        plan = plan_of(optimizer, names, config, "average", groups or ())
        self._attach(optimizer, plan, GroupCollective(model.process_group), compressor.grad_scaler)
        self._watch(optimizer, ((p, _accumulation(p)) for p in names))
        model.join_hook = refuse_join  # type: ignore[method-assign]

    def take(self, bucket: Any) -> Future[Tensor]:
        """Note gradients that DDP has ready; launch the buckets of which they are the last.

        Raises:
            NotAttachedError: this is a copy.
            ShapeChangedError, ConfigError: gradients are not what was planned.
        """
        if self.is_copy:
            raise NotAttachedError(
                "the state of this communication hook was copied or unpickled",
                cure="Call TopKEF().attach(model, optimizer), and load the copy's state_dict()",
            )
        buffer = bucket.buffer()
        future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
        if not self.active:
            future.set_result(buffer)
            return future
        if bucket.index() == 0 and self._futures:  # of a backward that has failed
            self._drop_step()
        self._futures.append((future, buffer))
        with torch.no_grad():
            for slot, gradient in self._gradients_in(bucket):
                if self._buckets.add(slot, gradient, gradient):
                    self._launch(slot.ordinal)
        if bucket.is_last():
            self._end_backward()
        return future

    def _gradients_in(self, bucket: Any) -> Iterator[tuple[Slot, Tensor]]:
        """The gradients of a bucket, in its memory; each in its parameter's order of elements."""
        buffer, start = bucket.buffer(), 0
        for p in bucket.parameters():
            view = buffer[start : start + p.numel()]
            start += p.numel()
            is_dense = torch.empty_like(p).stride() == p.stride()
            as_parameter = view.as_strided(p.shape, p.stride()) if is_dense else view.view(p.shape)
            yield self._buckets.slots[id(p)], as_parameter

    def _launch(self, ordinal: int) -> None:
        gradients = self._ready(ordinal)
        if self._preprocessing is not None:
            self._preprocess(self._preprocessing, ordinal, gradients)
        self._compressor.launch(ordinal, gradients)

    def _ready(self, ordinal: int) -> list[Tensor]:
        """Gradients of a complete bucket."""
        ready = (slot.ready for slot in self._buckets.slots_of(ordinal))
        return [each.dense for each in ready if each is not None]

    def _end_backward(self) -> None:
        """Have exchanges finished when backward is over, or now if it is over already.

        In the first backward of a static graph DDP hands over its buckets after the end, and waits
        without calling back.
        """
        model: Any = self._model()
        if model.static_graph and not self._buckets.exchanges:
            self._finish()
        else:
            Variable._execution_engine.queue_callback(self._finish)

    @torch.no_grad()
    def _finish(self) -> None:
        """Decode every bucket into DDP's memory, and let DDP hand that out."""
        step, gain = self._compressor.step, 1.0
        if self._preprocessing is not None:
            gain = self._preprocessing.gain(self._optimizer())
        with reporting.waiting():
            for ordinal in (bucket.ordinal for bucket in self._compressor.plan.buckets):
                step.finish(ordinal, self._ready(ordinal), gain)
                self._buckets.note_exchanged(ordinal)
        futures, self._futures = self._futures, []
        for future, buffer in futures:
            future.set_result(buffer)
        Variable._execution_engine.queue_callback(self._handed_out)

    @torch.no_grad()
    def _handed_out(self) -> None:
        """DDP has written what was exchanged to each gradient, but for parameters unused by all.

        Theirs come from residuals.
        """
        for slot in self._buckets.slots.values():
            assert slot.exchanged is not None  # in `_finish`, just before
            p, exchanged = slot.parameter, slot.exchanged.dense
            if not slot.has_fired and p.requires_grad and bool(torch.any(exchanged)):
                p.grad = torch.empty_like(p).copy_(exchanged)
            slot.note_gradient()
        self._hooks.exchanged()

    def _drop_step(self) -> None:
        """As `TrainingState._drop_step`."""
        if self.active:
            self._compressor.abandon()
            self._buckets.forget()
            self._futures.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {"label": self.label, "saved": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def state_of(model: Any) -> DDPState | None:
    """The state of the communication hook that is registered with a model."""
    registered = getattr(model, "_comm_hooks", ())
    found = (state for _, state in reversed(registered) if isinstance(state, DDPState))
    return next(found, None)


def _names_of(model: DistributedDataParallel) -> dict[Tensor, str]:
    """Names, in the module, of the parameters that DDP exchanges."""
    ignored, parameters = model.parameters_to_ignore, model.module.named_parameters()
    return {p: name for name, p in parameters if p.requires_grad and name not in ignored}


def _accumulation(p: Tensor) -> Any:
    """Autograd's node that adds to a parameter's gradient; DDP keeps it alive."""
    with torch.enable_grad():
        return p.expand_as(p).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
