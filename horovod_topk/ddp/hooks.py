"""Step hooks for an optimizer of a DDP model: the compressor's hook has exchanged all gradients.

Steps of other optimizers on these gradients are refused, too. Residuals change when the optimizer
that compression was attached to has stepped. To that optimizer, a step of any other one looks like
a step that was skipped: residuals stay as they were, and what was applied is sent again, so that
training goes on without error feedback.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from horovod_topk.errors import NotAttachedError, StepBeforeSynchronizeError
from horovod_topk.torch_training import steps
from horovod_topk.torch_training.gradients import any_applied
from horovod_topk.torch_training.tracing import untraced

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
ATTACH = (
    "Attach the compressor again with the optimizer that steps from now on, before backward(); "
    "residuals stay"
)


class Hooks(steps.Hooks):
    """Step hooks that refuse gradients whose buckets DDP did not pass to the compressor.

    Attributes:
        is_registered: returns whether DistributedDataParallel calls the compressor's hook.
    """

    is_registered: Callable[[], bool]  # set by `DDPState`
    _applied = -1  # number of exchanges when the present step began to apply them; -1: no step

    def watch(self, optimizer: Any, accumulations: Any) -> None:
        """As `steps.Hooks.watch`."""
        _WATCHING.add(self)
        _watch_steps()
        super().watch(optimizer, accumulations)

    def remove(self) -> None:
        """As `steps.Hooks.remove`."""
        super().remove()
        _WATCHING.discard(self)

    def check_after(self, optimizer: Any) -> None:
        """As `steps.Hooks.check_after`."""
        self._applied = -1

    def check_before(self, optimizer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """As `steps.Hooks.check_before`."""
        if steps.closure_of(args, kwargs) is None:
            self.check_closure(optimizer)

    def check_closure(self, optimizer: Any) -> None:
        """Refuse non-zero gradients that were not exchanged.

        Zeros are accepted: checkpoint libraries step on zero gradients to create optimizer states.
        """
        steps.check_all_are_known(optimizer, self.buckets.slots, {})
        slots = self.buckets.slots.values()
        gradients = [slot.parameter.grad for slot in slots if slot.parameter.grad is not None]
        if not any(slot.exchanged for slot in slots) and any(map(torch.any, gradients)):
            missing = [slot.spec.name for slot in slots if not slot.has_fired]
            if 0 < len(missing) < len(slots):
                problem, cure = INCOMPLETE
                raise StepBeforeSynchronizeError(problem, cure=cure, tensor=missing[0])
            never = IN_NO_SYNC if self.is_registered() else NEVER
            problem, cure = NOT_NOW if self.buckets.exchanges else never
            raise StepBeforeSynchronizeError(problem, cure=cure)
        self._applied = self.buckets.exchanges

    def check_is_alive(self) -> None:
        """Refuse to compress gradients for an optimizer that was deleted.

        Raises:
            NotAttachedError: it was deleted.
        """
        if self.optimizer() is None:
            problem = "the optimizer that compression was attached to was deleted"
            raise NotAttachedError(problem, cure=ATTACH)

    def check_other(self, optimizer: Any) -> None:
        """Refuse a step on exchanged gradients that is no part of the attached optimizer's step.

        Wrappers such as Lookahead, and torch's ZeroRedundancyOptimizer, step an inner optimizer.

        Raises:
            NotAttachedError: another optimizer would apply the gradients.
        """
        own, known = self.optimizer(), self.buckets.slots
        if optimizer is own or self._applied == self.buckets.exchanges:
            return
        stepped = (id(p) for group in optimizer.param_groups for p in group["params"])
        slots = [known[p] for p in stepped if p in known]
        if any_applied(slots) and not any(each is own for each in within(optimizer)):
            raise NotAttachedError(
                f"{type(optimizer).__name__}.step() was called, and compression is attached to "
                "another optimizer of these parameters",
                tensor=slots[0].spec.name,
                cure=ATTACH,
            )


def within(wrapper: Any) -> list[Any]:
    """The attributes of an object that are not None, and items of lists, tuples and dicts."""
    found = [each for each in vars(wrapper).values() if each is not None]
    found += [each for items in found if isinstance(items, list | tuple) for each in items]
    found += [each for items in found if isinstance(items, dict) for each in items.values()]
    return found


_WATCHING: weakref.WeakSet[Hooks] = weakref.WeakSet()


@functools.cache
def _watch_steps() -> None:
    """Register a hook with PyTorch that checks every optimizer's step before it changes weights."""

    def check(optimizer: Any) -> None:
        for each in list(_WATCHING):
            each.check_other(optimizer)

    @untraced
    def before_step(optimizer: Any, args: Any, kwargs: Any) -> Any:
        if steps.closure_of(args, kwargs) is None:
            return check(optimizer)
        # A closure computes the gradients. How often it is called is not limited here.
        return steps.with_one_exchange(args, kwargs, lambda: 0, lambda: check(optimizer))

    register_optimizer_step_pre_hook(before_step)
