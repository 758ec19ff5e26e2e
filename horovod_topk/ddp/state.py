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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from horovod_topk import reporting
from horovod_topk.core.run.attached import Attached
from horovod_topk.core.run.runner import StepRunner
from horovod_topk.core.state.state_dict import METHOD_STATE, OWNED, RESIDUALS, STEPS
from horovod_topk.ddp.hooks import Hooks
from horovod_topk.ddp.refusals import REWRAP, check_inherits, check_optimizer, check_trained
from horovod_topk.errors import ConfigError, NotAttachedError, UnsupportedOperationError
from horovod_topk.torch_training.collective import GroupCollective
from horovod_topk.torch_training.optimizer_settings import check_has_hooks
from horovod_topk.torch_training.state import TrainingCompressor, TrainingState
from horovod_topk.torch_training.tracing import untraced

Groups = Sequence[Sequence[Tensor]]


class DDPState(TrainingState):
    """State of one model's communication hook, as `TopKEF.of(model)` returns it.

    A copy of it, as in a pickled model, keeps its residuals and compresses nothing: PyTorch does
    not register hooks again, and `check_is_compressed` keeps the copied model from training. Attach
    a compressor to the copied model, and give `load_state_dict` what the copy's `state_dict()`
    returns.

    Args:
        model: the model, without a communication hook.
        optimizer: the optimizer of its parameters.
        compressor: the compressor with the settings.
        groups: lists of parameters that are sent together.
    """

    hooks = Hooks
    _hooks: Hooks
    is_copy = False

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: Any,
        compressor: TrainingCompressor,
        groups: Groups | None = None,
    ) -> None:
        label = f"a {type(model.module).__name__} with {len(_trained_names(model))} parameters"
        ranks = SimpleNamespace(included=lambda: True, size=model.process_group.size)
        super().__init__(optimizer, ranks, label)
        self._model = weakref.ref(model)
        self._names: dict[Tensor, str] | None = None  # of the parameters trained; None: not yet
        self._futures: list[tuple[Future[Tensor], Tensor]] = []  # DDP waits for them
        self._failed: BaseException | None = None  # to be raised at the end of backward
        self._compress_for(model, optimizer, compressor, groups)
        if self.active:
            self._check = model.register_forward_pre_hook(check_is_compressed)
            model.join_hook = refuse_join  # type: ignore[method-assign]  # there is no hook for it

    def _compress_for(
        self,
        model: DistributedDataParallel,
        optimizer: Any,
        compressor: TrainingCompressor,
        groups: Groups | None,
    ) -> None:
        """Attach an optimizer, or replace the attached one, and compress its gradients."""
        names, config, before = _trained_names(model), compressor.config, self._names
        check_optimizer(optimizer, names)
        if not self.active:
            self._leave(optimizer, config)
            return
        if before is None:
            check_trained(model, names)
        else:
            changed = {*names.values()} ^ {*before.values()}
            check_inherits(self._compressor.config, config, changed)
        collective = GroupCollective(model.process_group)
        hooks: Any = self._hooks_for(optimizer, names, compressor, collective, groups=groups or ())
        new = hooks.compressor
        if before is not None:
            new.load_state_dict(inherited(self._compressor, new.state_dict()))
        hooks.is_registered = lambda: not all(s.is_copy for s in _states_of(self._model()))
        self._watch(hooks, optimizer, ((p, _accumulation_of(p)) for p in names))
        if before is not None:
            self._drop_step()
            self._hooks.remove()
            new.callbacks += self._compressor.callbacks
        self._names = names
        self._use(hooks)

    def detach(self) -> None:
        """As `TrainingState.detach`."""
        super().detach()
        if self.active:
            self._check.remove()
            vars(self._model()).pop("join_hook", None)

    def replace(
        self,
        model: DistributedDataParallel,
        optimizer: Any,
        compressor: TrainingCompressor,
        groups: Groups | None = None,
    ) -> None:
        """Compress for another optimizer from the next backward on; see `inherited`.

        Raises:
            ConfigError, StateDictError, PlanMismatchError: as `attach`; nothing has changed.
        """
        if self.active and optimizer is self._hooks.optimizer():
            raise ConfigError(
                "compression is attached to this model and this optimizer already",
                cure=f"Pass a new optimizer to replace this one, or {REWRAP}",
            )
        check_has_hooks(optimizer)
        self._compress_for(model, optimizer, compressor, groups)

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
        if bucket.index() == 0 and self._futures:  # of a backward that did not end
            self._drop_step()
            self._failed = None
        self._futures.append((future, buffer))
        with self._failing_later(), torch.no_grad():
            self._hooks.check_is_alive()
            for p, gradient in _gradients_in(buffer, bucket.parameters()):
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
        if self._hooks.preprocessing is not None:
            self._hooks.preprocess(ordinal, gradients)
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
        by = self._hooks.preprocessing
        gain = 1.0 if by is None else by.gain(self._hooks.optimizer())
        for ordinal in [bucket.ordinal for bucket in self._compressor.plan.buckets]:
            self._compressor.step.finish(ordinal, self._buckets.ready(ordinal), gain)
            self._buckets.note_exchanged(ordinal)

    @untraced
    @torch.no_grad()
    def _handed_out(self) -> None:
        """Raise a kept error, or note exchanged gradients, once DDP has copied its buckets back.

        DistributedDataParallel leaves out parameters that no rank has used in this step; their
        residuals may still have sent something.
        """
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed
        for slot in self._buckets.slots.values():
            slot.hand_out()
        self._hooks.exchanged()

    def _drop_step(self) -> None:
        """As `TrainingState._drop_step`."""
        if self.active:
            self._compressor.abandon()
            self._buckets.forget()
            self._futures = []

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
    """Refuse DistributedDataParallel's join(), which calls this as the model's `join_hook`.

    Raises:
        UnsupportedOperationError: always.
    """
    raise UnsupportedOperationError(
        "join() was called for a model whose gradients are compressed: a rank that has joined "
        "takes part with zero gradients, and has no residuals to send",
        cure="Give every rank the same number of steps, as DistributedSampler(drop_last=True) does",
    )


def check_is_compressed(model: nn.Module, inputs: Any) -> None:
    """Refuse to train a copy of a model: a forward pre-hook, which copies of the model have, too.

    PyTorch registers no communication hook with a model that is copied or unpickled, and says
    nothing.

    Raises:
        NotAttachedError: it would train with the gradients of each rank alone, or dense.
    """
    copies = [state.is_copy for state in _states_of(model)]
    if copies and all(copies) and model.training and torch.is_grad_enabled():
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


def inherited(before: StepRunner[Tensor], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state dict with which the compression of a new optimizer begins.

    The new one inherits the residuals of ranks and owners, and the method's own state. Momentum,
    arrivals, learning rates, warm-up, the ratio asked for and the guard's memory start anew, as
    they belong to the optimizer that was replaced: in the first steps of a new one its moments
    form.

    A residual that has grown because the learning rate has fallen (`core.state.learning_rates`) is
    scaled back to gradients at the largest rate: the new optimizer's learning rate has no relation
    to the old one's, and may be of another kind (SGD's and Adam's).

    Args:
        before: the compressor of the optimizer that is replaced.
        own: the state dict of the new optimizer's compressor.
    """
    state = before.state_dict()
    if before.rates is not None:
        for part in (state, state.get(OWNED, {})):
            for name, residual in part.get(RESIDUALS, {}).items():
                residual.mul_(before.rates.decay(name))
    kept = {key: state[key] for key in state if key in (RESIDUALS, OWNED)}
    of_method = {METHOD_STATE + n for n, part in before.states.items() if not part.is_optional}
    return {**own, **kept, **{key: state[key] for key in of_method}, STEPS: before.ended}


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
