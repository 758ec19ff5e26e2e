"""Hooks of PyTorch on one optimizer: before gradients are added to, and around its steps."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from horovod_topk.core.compressor import Compressor
from horovod_topk.core.momentum_takeover import note_taken
from horovod_topk.torch import momentum
from horovod_topk.torch.buckets import Buckets
from horovod_topk.torch.clipping_late import LateClipping
from horovod_topk.torch.scaling import warn_of_scaler
from horovod_topk.torch.stepping import check_after, check_before, with_one_exchange

LOOKS = 8  # calls of the hook before a step, two a step


class Hooks:
    """Checks each step of one optimizer, and commits or rolls back what it has applied.

    Args:
        compressor: of its gradients.
        buckets: the same gradients, as they become ready.
        loan: the optimizer's own momentum, if it is corrected instead of it.
        has_scaler: whether the loss's scaler is known.
    """

    late_clipping: LateClipping  # once an optimizer is watched

    def __init__(
        self,
        compressor: Compressor[torch.Tensor],
        buckets: Buckets,
        loan: momentum.Loan | None,
        *,
        has_scaler: bool = False,
    ) -> None:
        self._compressor, self._buckets, self._loan = compressor, buckets, loan
        self._has_exchanged = False  # since the last step
        config = compressor.plan.config
        keeps = config.momentum or config.ratio < 1.0 or config.withheld()
        self._looks = LOOKS if keeps and not has_scaler else 0  # for a scaler, still to be taken
        self._of_scaler: tuple[str, ...] = ()

    def watch(self, optimizer: Any) -> None:
        """Be told of steps and of what gradients are added to."""
        factor = self._compressor.plan.config.momentum
        given = 0.0 if self._loan is not None else factor  # users see velocities
        self.late_clipping = LateClipping(optimizer, given, self._buckets)
        if self._loan is not None:
            note_taken(type(optimizer).__name__, factor)
        trained = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
        for p, accumulation in zip(trained, optimizer._grad_accs, strict=True):
            accumulation.register_prehook(partial(self._before_accumulation, id(p)))
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was warned of."""
        of_loan = () if self._loan is None else self._loan.warnings
        return (*of_loan, *self._of_scaler, *self.late_clipping.warnings)

    def _before_accumulation(self, parameter: int, _: Any) -> None:
        """Refuse to add to an exchanged gradient; one cleared in place is exchanged no more."""
        slot = self._buckets.slots.get(parameter)
        if slot is not None and slot.exchanged is not None:
            slot.check_not_exchanged()
            slot.exchanged = None

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Returns what the step is given instead."""
        check_before(optimizer, args, kwargs)
        if self._looks:
            self._of_scaler = warn_of_scaler(type(optimizer).__name__)
            self._looks = 0 if self._of_scaler else self._looks - 1
        factor = self._compressor.plan.config.momentum
        if self._loan is not None:
            if self._exchanges_first(optimizer):  # and then comes here once more
                self._loan.take_back(optimizer)  # from a step that has failed
            else:
                self._loan.lend(optimizer)
        elif factor:
            momentum.check_not_twice(optimizer, factor)
        else:
            momentum.give_back(optimizer)
        self.late_clipping.check(optimizer)
        failed = partial(self._take_back, optimizer)
        return with_one_exchange(args, kwargs, lambda: self._buckets.exchanges, failed)

    def _exchanges_first(self, optimizer: Any) -> bool:
        """Whether the step that begins is Horovod's around the optimizer's own."""
        was_called = optimizer._synchronized or not self._has_exchanged
        return bool(optimizer._should_synchronize and was_called)

    def synchronized(self) -> None:
        """Note that `synchronize()` is over: from here on a user may change gradients."""
        self._has_exchanged = True
        self.late_clipping.begin()

    def _take_back(self, optimizer: Any) -> None:
        """End what the optimizer did without while it stepped."""
        if self._loan is not None:
            self._loan.take_back(optimizer)

    @torch.no_grad()
    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._take_back(optimizer)
        self._has_exchanged = False
        check_after(optimizer)
        self.late_clipping.check(optimizer)  # of a closure that has exchanged within the step
        if self._buckets.are_applied():
            self._compressor.commit()
        else:  # what was exchanged has been thrown away: the step applied something else
            self._compressor.rollback()
        self._buckets.forget_exchanged()
