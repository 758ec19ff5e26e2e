"""Error feedback of one FSDP2 model: it exchanges shards of gradients between nodes.

FSDP2 reduces gradients within a node and writes each rank's shard to `p.grad`, unit by unit, while
backward goes on. It then calls the parameter's post-accumulate hooks. Buckets are sent in the
plan's order once they are complete, and are received at the end of backward. A parameter that gets
no gradient holds its bucket until then.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.autograd import Variable

from horovod_topk import reporting
from horovod_topk.fsdp.refusals import COMPILED_AUTOGRAD, check_backward, check_settings
from horovod_topk.torch_training.collective import GroupCollective
from horovod_topk.torch_training.gradients import local, part_of
from horovod_topk.torch_training.in_backward import BackwardHooks, BackwardState, Refusals
from horovod_topk.torch_training.state import TrainingCompressor
from horovod_topk.torch_training.tracing import untraced

SYNC = (
    "Call set_requires_gradient_sync(True) on the model before a step's last backward(), step() "
    "when that has ended, and zero_grad() after the step"
)
ACCUMULATE = (
    "Call set_requires_gradient_sync(False) on the model before all but a step's last backward(), "
    "zero_grad() after the step, and checkpoint activations with use_reentrant=False"
)


class Hooks(BackwardHooks):
    """Step hooks that refuse gradients which were not exchanged between nodes."""

    refusals = Refusals(
        never=(
            "step() was called, and no backward() of the model has run",
            f"{SYNC}, and leave {COMPILED_AUTOGRAD} at False",
        ),
        local=("step() was called on gradients of this node alone", SYNC),
        not_now=SYNC,
        incomplete=SYNC,
    )


class FSDPState(BackwardState):
    """State of one model's compression between nodes, as `TopKEF.of(model)` returns it.

    Args:
        group: the ranks that have the same shard.
        before: the state that it replaces, whose residuals it inherits.
    """

    hooks = Hooks

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Any],
        compressor: TrainingCompressor,
        group: dist.ProcessGroup,
        groups: Sequence[Sequence[Tensor]] | None = None,
        before: FSDPState | None = None,
    ) -> None:
        names: dict[Any, str] = {p: name for name, p in model.named_parameters() if p.requires_grad}
        label = f"a {type(model).__name__} with {len(names)} sharded parameters"
        super().__init__(optimizers, group, label)
        self._root: Any = weakref.ref(model)
        self.part = part_of(next(iter(names)))
        self._units: dict[int, Any] = {}  # FSDP's group of each parameter, by id
        self._next: dict[BackwardHooks, int] = {}  # buckets that were sent in this backward
        # Whether buckets wait for the end of backward: hooks of several optimizers differ on nodes,
        # those of a unit that is used more than once may be called for parts of a gradient, and a
        # scaled gradient is unscaled once.
        self._holds = len(optimizers) > 1 or compressor.grad_scaler is not None
        check_settings(optimizers, compressor.config)
        if not self._exchanges_for(optimizers, names, compressor.config):
            return
        self._collective = GroupCollective(group)
        each = self._hooks_for_each(model, optimizers, names, compressor, groups, before)
        if before is not None:
            before.detach()
        self._use(*each)
        held = weakref.WeakMethod(self._ready)  # Python frees no cycle through a parameter's hook

        def note(p: Any) -> None:
            if (ready := held()) is not None:
                ready(p)

        handles = [p.register_post_accumulate_grad_hook(note) for p in names]
        handles.append(model.register_forward_pre_hook(self._before_forward))
        self._other_handles += handles

    @untraced
    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        """Drop what a backward that has raised has left, and note gradients that were cleared."""
        if not torch.is_grad_enabled():
            return
        if self._next:
            self._drop_step()
        for _, slot in self._slots.values():
            seen, now = slot.exchanged, slot.parameter.grad
            if seen is not None and (now is None or (now is seen.owner and not slot.waits())):
                slot.exchanged = None

    @untraced
    @torch.no_grad()
    def _ready(self, p: Any) -> None:
        """Note a parameter's gradient, which FSDP2 has just written or added to."""
        check_backward()
        if not self._reduces(p):
            return
        hooks, slot = self._slots[id(p)]
        if not self._next:
            self._next = {each: 0 for each, _ in self._slots.values()}
            Variable._execution_engine.queue_callback(self._finish)
        with self._failing_later():
            hooks.check_is_alive()
            slot.check_not_exchanged(ACCUMULATE)
            self._holds = self._holds or slot.ready is not None
            slot.has_fired = True
            slot.exchanged = None
            hooks.buckets.add(slot, p.grad, local(p.grad))
            if not self._holds:
                self._launch(hooks)

    def _reduces(self, p: Tensor) -> bool:
        """Whether this backward is one whose gradients are exchanged: not one that accumulates."""
        model = self._root()
        if id(p) not in self._units:
            states = (getattr(module, "_get_fsdp_state", None) for module in model.modules())
            units = (unit for state in states if state for unit in _units_of(state()))
            self._units = {id(each.sharded_param): u for u in units for each in u.fsdp_params}
        is_last: bool = model._get_fsdp_state()._state_ctx.is_last_backward
        return is_last and self._units[id(p)].all_reduce_grads

    def _launch(self, hooks: BackwardHooks) -> None:
        """Send the buckets that are complete, in the plan's order, which all ranks have."""
        ordinals = [bucket.ordinal for bucket in hooks.compressor.plan.buckets]
        while self._next[hooks] < len(ordinals):
            if not hooks.buckets.is_complete(ordinal := ordinals[self._next[hooks]]):
                return
            self._next[hooks] += 1
            hooks.launch(ordinal)

    @untraced
    @torch.no_grad()
    def _finish(self) -> None:
        """Send what is left, with zeros for absent gradients, and write exchanged gradients.

        An optimizer none of whose parameters has a gradient on any node is left out.
        """
        fired: list[BackwardHooks] = []
        with self._failing_later(), reporting.waiting():
            if self._failed is None:
                fired = self._agreed_on()
                for hooks in fired:
                    self._complete(hooks)
                for hooks in fired:
                    hooks.receive()
        failed, self._failed = self._failed, None
        self._next = {}
        if failed is not None:
            exchanged = {slot: slot.exchanged for _, slot in self._slots.values()}
            self._drop_step()
            for slot, seen in exchanged.items():  # adding to one more often is no better
                slot.exchanged = seen
            raise failed
        for hooks in fired:
            hooks.hand_out(zeros=True)  # nodes and shards have to agree on what is None

    def _agreed_on(self) -> list[BackwardHooks]:
        """The optimizers that have a gradient on any node."""
        every = list(self._next)
        if len(every) == 1:
            return every
        fired = [hooks.buckets.has_fired() for hooks in every]
        own = torch.tensor(fired, dtype=torch.uint8, device="cpu")
        gathered = self._collective.allgather(own, f"{every[0].compressor.name}.fired").wait()
        has = gathered.view(-1, len(every)).any(0).tolist()
        return [hooks for hooks, fired in zip(every, has, strict=True) if fired]

    def _complete(self, hooks: BackwardHooks) -> None:
        """Add the gradients that backward has not announced, and send what is not sent yet.

        They are of earlier backwards that were not exchanged, or zeros.
        """
        if self._holds and self._next[hooks]:  # parts of gradients were sent: anew, with the whole
            hooks.compressor.abandon()
            self._next[hooks] = 0
        for slot in hooks.buckets.slots.values():
            if slot.ready is None:
                slot.check_not_exchanged(ACCUMULATE)
                shape, dtype, device = slot.kind
                gradient = slot.parameter.grad
                slot.has_fired = gradient is not None
                if gradient is None:
                    gradient = torch.zeros(shape, dtype=dtype, device=device)
                hooks.buckets.add(slot, gradient, local(gradient))
        self._launch(hooks)

    def _drop_step(self) -> None:
        super()._drop_step()
        self._next, self._failed = {}, None


def _units_of(state: Any) -> list[Any]:
    """FSDP2's groups of parameters that are reduced together."""
    if hasattr(state, "_fsdp_param_groups"):  # PyTorch 2.12
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []
