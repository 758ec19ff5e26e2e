"""Error feedback of one DistributedDataParallel model: it exchanges the gradients of DDP's buckets.

A model may have several optimizers. Each has a plan and a step runner of its own, and gets the
gradients of its parameters. DDP hands over all gradients in each backward, so that all are
exchanged. What is exchanged for an optimizer none of whose gradients any rank has computed is taken
back at once, as a GAN's discriminator learns without its generator.

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
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from horovod_topk import reporting
from horovod_topk.core.run.attached import Attached
from horovod_topk.ddp.hooks import Hooks
from horovod_topk.ddp.refusals import REWRAP, check_inherits, check_trained, counted_by
from horovod_topk.errors import NotAttachedError, UnsupportedOperationError
from horovod_topk.torch_training.gradients import Slot
from horovod_topk.torch_training.in_backward import BackwardState, hooks_on
from horovod_topk.torch_training.optimizer_settings import check_has_hooks
from horovod_topk.torch_training.state import TrainingCompressor, live_states
from horovod_topk.torch_training.tracing import untraced

Groups = Sequence[Sequence[Tensor]]


class DDPState(BackwardState):
    """State of one model's communication hook, as `TopKEF.of(model)` returns it.

    A copy of it, as in a pickled model, keeps its residuals and compresses nothing: PyTorch does
    not register hooks again, and `check_is_compressed` keeps the copied model from training. Attach
    a compressor to the copied model, and give `load_state_dict` what the copy's `state_dict()`
    returns.
    """

    hooks = Hooks
    is_copy = False

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizers: Sequence[Any],
        compressor: TrainingCompressor,
        groups: Groups | None = None,
    ) -> None:
        label = f"a {type(model.module).__name__} with {len(_trained_names(model))} parameters"
        super().__init__(optimizers, model.process_group, label)
        self._model = weakref.ref(model)
        self._names: dict[Tensor, str] | None = None  # of the parameters trained; None: not yet
        self._taking_part: list[Hooks] = []  # of the optimizers whose gradients are exchanged
        self._untouched: dict[Hooks, list[Any]] = {}  # gradients, where this rank computed none
        self._futures: list[tuple[Future[Tensor], Tensor]] = []  # DDP waits for them
        self._handed_over = 0  # parameters whose gradients they have
        self._counted = counted_by(model)  # it locks, so that the hook cannot ask
        self._compress_for(model, optimizers, compressor, groups)
        if self.active:
            self._other_handles.append(model.register_forward_pre_hook(check_is_compressed))
            model.join_hook = refuse_join  # type: ignore[method-assign]  # there is no hook for it

    def _compress_for(
        self,
        model: DistributedDataParallel,
        optimizers: Sequence[Any],
        compressor: TrainingCompressor,
        groups: Groups | None,
    ) -> None:
        """Attach optimizers, or replace the attached ones, and compress their gradients."""
        names, config, before = _trained_names(model), compressor.config, self._names
        if not self._exchanges_for(optimizers, names, config):
            return
        if before is None:
            check_trained(model, names)
        else:
            changed = {*names.values()} ^ {*before.values()}
            check_inherits(self._compressor.config, config, changed)
        inherits = None if before is None else self
        made = model.module, optimizers, names, compressor, groups, inherits
        each, held = self._hooks_for_each(*made), self._model
        for hooks in each:  # which must not refer to this state, as it refers to them
            hooks.is_registered = lambda: not all(s.is_copy for s in _states_of(held()))
        if before is not None:
            self._drop_step()
            for hooks in self._each:
                hooks.remove()
            for hooks in each:
                hooks.compressor.callbacks += self._compressor.callbacks
        self._names = names
        self._use(*each)

    def detach(self) -> None:
        """As `TrainingState.detach`."""
        super().detach()
        if self.active and (model := self._model()) is not None:
            vars(model).pop("join_hook", None)

    def _accumulations(self, hooks: Hooks) -> Iterator[tuple[Tensor, Any]]:
        slots = hooks.buckets.slots.values()
        return ((slot.parameter, _accumulation_of(slot.parameter)) for slot in slots)

    def replace(
        self,
        model: DistributedDataParallel,
        optimizers: Sequence[Any],
        compressor: TrainingCompressor,
        groups: Groups | None = None,
    ) -> None:
        """Compress for other optimizers from the next backward on; see `inherit`."""
        self.check_is_new(optimizers, f", or {REWRAP}")
        for optimizer in optimizers:
            check_has_hooks(optimizer)
        self._compress_for(model, optimizers, compressor, groups)

    def take(self, bucket: Any) -> Future[Tensor]:
        """Note the ready gradients of DDP's bucket; launch buckets that are complete with them.

        An error is raised at the end of backward: DDP cannot go on after an error in a hook.
        """
        if self.is_copy:
            raise NotAttachedError(
                "the state behind this model was copied or unpickled",
                cure="Call TopKEF().attach(model, optimizer), and load the copy's state_dict()",
            )
        buffer = bucket.buffer()
        future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
        if not self.active:
            future.set_result(buffer)
            return future
        if not self._futures:
            if not self._has_exchanged():
                self._take_over()
            self._taking_part = [hooks for hooks in self._each if not hooks.buckets.waits()]
        self._futures.append((future, buffer))
        parameters = bucket.parameters()
        self._handed_over += len(parameters)
        with self._failing_later(), torch.no_grad():
            for hooks in self._each:
                hooks.check_is_alive()
            for p, gradient in _gradients_in(buffer, parameters):
                if id(p) in self._slots:  # it is not if it was frozen when this was attached
                    self._add(*self._slots[id(p)], gradient)
        self._end_backward(is_last=bucket.is_last())
        return future

    def _has_exchanged(self) -> bool:
        """Whether gradients were exchanged since the optimizers were attached."""
        return any(hooks.buckets.exchanges for hooks in self._each)

    def _take_over(self) -> None:
        """Detach the optimizers from the models that they had before this one."""
        others = [s for s in live_states() if isinstance(s, DDPState) and s is not self]
        for state in others:
            if any(state.has(hooks.optimizer()) for hooks in self._each):
                state.detach()
        for hooks in self._each:
            for other in hooks_on(hooks.optimizer()):
                if other is not hooks:
                    other.remove()

    def _add(self, hooks: Hooks, slot: Slot, gradient: Tensor) -> None:
        """Note a gradient; launch its bucket if it is the last, unless it waits for a step."""
        if hooks not in self._taking_part:
            if slot.has_fired:
                for each in hooks.buckets.slots.values():
                    each.check_not_exchanged()
        elif hooks.buckets.add(slot, gradient, gradient):
            hooks.launch(slot.ordinal)

    def _end_backward(self, *, is_last: bool) -> None:
        """Finish exchanges at the end of backward, if DDP has handed over its last bucket.

        In the first backward of a static graph this is at once: DDP calls its hooks at the end, and
        says of each bucket that it is the first.
        """
        model: Any = self._model()
        if model.static_graph and not self._has_exchanged():
            if self._counted is not None:
                is_last = self._handed_over == self._counted[0]
            if is_last:
                self._finish()
        elif is_last:
            Variable._execution_engine.queue_callback(self._finish)

    @untraced
    @torch.no_grad()
    def _finish(self) -> None:
        """Write exchanged gradients to DDP's buckets, and complete the futures DDP waits for."""
        with self._failing_later(), reporting.waiting():
            for hooks in self._taking_part if self._failed is None else ():
                hooks.receive()
                if not hooks.buckets.has_fired():
                    self._untouched[hooks] = hooks.buckets.present()
        futures = self._futures
        if self._failed is not None:
            self._drop_step()
            for _, buffer in futures:
                buffer.fill_(math.nan)
        self._futures, self._handed_over = [], 0
        for future, buffer in futures:
            future.set_result(buffer)
        Variable._execution_engine.queue_callback(self._handed_out)

    @untraced
    @torch.no_grad()
    def _handed_out(self) -> None:
        """Raise a kept error, or note exchanged gradients, once DDP has copied its buckets back.

        DistributedDataParallel leaves out parameters that no rank has used in this step; their
        residuals may still have sent something. If these are all parameters of an optimizer, it has
        no step to make.
        """
        failed, self._failed = self._failed, None
        untouched, self._untouched = self._untouched, {}
        taking_part, self._taking_part = self._taking_part, []
        if failed is not None:
            raise failed
        for hooks in taking_part:
            if hooks in untouched and hooks.buckets.present() == untouched[hooks]:
                hooks.take_back()
            else:
                hooks.hand_out()

    def _drop_step(self) -> None:
        super()._drop_step()
        self._futures, self._handed_over = [], 0

    # Copies.

    def state_dict(self) -> dict[str, Any]:
        """As `Attached.state_dict`; a copy returns its original's state dict."""
        return dict(self._saved) if self.is_copy else super().state_dict()

    def __getstate__(self) -> dict[str, Any]:
        return {"label": self.label, "saved": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        reason = "its model was copied or unpickled: attach anew"
        Attached.__init__(self, None, "average", state["label"], reason)
        self.is_copy, self._saved = True, state["saved"]


def refuse_join(**kwargs: Any) -> NoReturn:
    """Refuse DistributedDataParallel's join(), which calls this as the model's `join_hook`."""
    raise UnsupportedOperationError(
        "join() was called for a model whose gradients are compressed: a rank that has joined "
        "takes part with zero gradients, and has no residuals to send",
        cure="Give every rank the same number of steps, as DistributedSampler(drop_last=True) does",
    )


def check_is_compressed(model: nn.Module, inputs: Any) -> None:
    """Refuse to train a copy of a model: a forward pre-hook, which copies of the model have, too.

    PyTorch registers no communication hook with a model that is copied or unpickled, and says
    nothing.
    """
    copies = [state.is_copy for state in _states_of(model)]
    trains = model.training and torch.is_grad_enabled()
    if copies and all(copies) and trains and any(p.requires_grad for p in model.parameters()):
        raise NotAttachedError(
            "this model is a copy of one whose gradients are compressed, and PyTorch does not "
            "copy communication hooks: it would train without compression",
            cure="Call TopKEF().attach(model, optimizer) with the copy and an optimizer of its "
            "parameters. To train without, DistributedDataParallel(model.module); to evaluate, "
            "model.eval()",
        )


def _states_of(model: Any) -> list[DDPState]:
    """States whose hook PyTorch calls with a model's gradients, and copies of states."""
    states = (state for _, state in getattr(model, "_comm_hooks", ()))
    return [state for state in states if isinstance(state, DDPState)]


def _trained_names(model: DistributedDataParallel) -> dict[Tensor, str]:
    """Names of the parameters that a model trains, but for those that it ignores."""
    parameters, ignored = model.module.named_parameters(), model.parameters_to_ignore
    return {p: name for name, p in parameters if p.requires_grad and name not in ignored}


def _gradients_in(memory: Tensor, parameters: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Parameters, and the views of their gradients, which are contiguous in flat memory.

    A gradient has its parameter's strides if these are dense, and is row-major otherwise.
    """
    start = 0
    for p in parameters:
        view = memory[start : start + p.numel()]
        start += p.numel()
        is_dense = torch.empty_like(p).stride() == p.stride()
        yield p, view.as_strided(p.shape, p.stride()) if is_dense else view.view(p.shape)


def _accumulation_of(p: Tensor) -> Any:
    """Autograd's node that adds to a parameter's gradient; alive while referenced."""
    with torch.enable_grad():
        return p.expand_as(p).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
