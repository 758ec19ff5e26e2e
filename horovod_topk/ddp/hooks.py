"""`horovod_topk.torch_training.hooks` for the optimizer of a DDP model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from horovod_topk.errors import StepBeforeSynchronizeError
from horovod_topk.torch_training import hooks
from horovod_topk.torch_training.other_optimizers import OtherOptimizers
from horovod_topk.torch_training.stepping import check_all_are_known, closure_of

CURE = (
    "Call TopKEF().attach(model, optimizer) before backward(). Lightning needs a callback for it, "
    "as it registers ddp_comm_hook= on CUDA devices alone: docs/ddp.md"
)
NEVER = "step() was called, and DistributedDataParallel never called this compressor's hook", CURE
NOT_NOW = (
    "step() was called on gradients that were not exchanged, or were applied already",
    "Run a step's last backward() outside of no_sync(), and zero_grad() after the step",
)
IN_NO_SYNC = (
    "step() was called on gradients of this rank alone: no backward() has exchanged any",
    "Run a step's last backward() outside of no_sync(), and call the model itself, not its .module",
)
INCOMPLETE = (
    "it has no gradient, and step() was called on others that were not exchanged",
    "If it is frozen or unused, pass find_unused_parameters=True to DistributedDataParallel",
)


class Hooks(hooks.Hooks):
    """Step hooks that refuse gradients whose buckets DDP did not pass to the compressor."""

    others: OtherOptimizers  # set by `watch`
    is_registered: Callable[[], bool]  # whether DistributedDataParallel calls the hook

    def watch(self, optimizer: Any, accumulations: Any) -> None:
        """As `hooks.Hooks.watch`."""
        self.others = OtherOptimizers(optimizer, self._buckets)
        super().watch(optimizer, accumulations)

    def remove(self) -> None:
        """As `hooks.Hooks.remove`."""
        super().remove()
        self.others.allow()

    def _check_after(self, optimizer: Any) -> None:
        self.others.applied = -1

    def _check_before(self, optimizer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if closure_of(args, kwargs) is None:
            self._check_closure(optimizer)

    def _check_closure(self, optimizer: Any) -> None:
        """Refuse non-zero gradients that were not exchanged.

        Zeros are accepted: checkpoint libraries step on zero gradients to create optimizer states.
        """
        check_all_are_known(optimizer, self._buckets.slots, {})
        slots = self._buckets.slots.values()
        gradients = [slot.parameter.grad for slot in slots if slot.parameter.grad is not None]
        if not any(slot.exchanged for slot in slots) and any(map(torch.any, gradients)):
            missing = [slot.spec.name for slot in slots if not slot.has_fired]
            if 0 < len(missing) < len(slots):
                problem, cure = INCOMPLETE
                raise StepBeforeSynchronizeError(problem, cure=cure, tensor=missing[0])
            never = IN_NO_SYNC if self.is_registered() else NEVER
            problem, cure = NOT_NOW if self._buckets.exchanges else never
            raise StepBeforeSynchronizeError(problem, cure=cure)
        self.others.applied = self._buckets.exchanges
