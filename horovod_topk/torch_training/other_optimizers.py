"""Refuses steps of optimizers on gradients that are compressed for another optimizer.

Residuals change when the optimizer that compression was attached to has stepped. To that optimizer,
a step of any other one looks like a step that was skipped: residuals stay as they were, and what
was applied is sent again, so that training goes on without error feedback.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from horovod_topk.errors import NotAttachedError
from horovod_topk.torch_training.buckets import Buckets
from horovod_topk.torch_training.ready import any_applied
from horovod_topk.torch_training.stepping import closure_of, with_one_exchange
from horovod_topk.torch_training.tracing import untraced

CURE = (
    "Attach the compressor again with the optimizer that steps from now on, before backward(); "
    "residuals stay"
)


class OtherOptimizers:
    """Refuses steps of other optimizers on the gradients of one optimizer.

    Args:
        optimizer: the optimizer that compression was attached to.
        buckets: its gradients.

    Attributes:
        applied: number of exchanges when the optimizer's present step began to apply them; -1: it
            is not stepping.
    """

    def __init__(self, optimizer: Any, buckets: Buckets) -> None:
        self._optimizer, self._buckets, self.applied = weakref.ref(optimizer), buckets, -1
        _LIVE.add(self)
        _watch_steps()

    def allow(self) -> None:
        """Allow all steps from now on, as the optimizer was replaced."""
        _LIVE.discard(self)

    def check_is_alive(self) -> None:
        """Refuse to compress gradients for an optimizer that was deleted.

        Raises:
            NotAttachedError: it was deleted.
        """
        if self._optimizer() is None:
            problem = "the optimizer that compression was attached to was deleted"
            raise NotAttachedError(problem, cure=CURE)

    def check_step(self, optimizer: Any) -> None:
        """Refuse a step on exchanged gradients that is no part of the attached optimizer's step.

        Wrappers such as Lookahead, and torch's ZeroRedundancyOptimizer, step an inner optimizer.

        Raises:
            NotAttachedError: another optimizer would apply the gradients.
        """
        own = self._optimizer()
        if optimizer is own or self.applied == self._buckets.exchanges:
            return
        if own is not None and any(each is own for each in vars(optimizer).values()):
            return
        stepped = (id(p) for group in optimizer.param_groups for p in group["params"])
        slots = [self._buckets.slots[p] for p in stepped if p in self._buckets.slots]
        if any_applied(slots):
            raise NotAttachedError(
                f"{type(optimizer).__name__}.step() was called, and compression is attached to "
                "another optimizer of these parameters",
                tensor=slots[0].spec.name,
                cure=CURE,
            )


_LIVE: weakref.WeakSet[OtherOptimizers] = weakref.WeakSet()


@functools.cache
def _watch_steps() -> None:
    """Register a hook with PyTorch that checks every optimizer's step before it changes weights."""

    def check(optimizer: Any) -> None:
        for each in list(_LIVE):
            each.check_step(optimizer)

    @untraced
    def before_step(optimizer: Any, args: Any, kwargs: Any) -> Any:
        if closure_of(args, kwargs) is None:
            return check(optimizer)
        # A closure computes the gradients. How often it is called is not limited here.
        return with_one_exchange(args, kwargs, lambda: 0, lambda: check(optimizer))

    register_optimizer_step_pre_hook(before_step)
