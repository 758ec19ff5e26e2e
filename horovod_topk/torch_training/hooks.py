"""Hooks of PyTorch on one optimizer: before gradients are added to, and around its steps."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from horovod_topk.core.compressor import Compressor
from horovod_topk.core.momentum_takeover import note_taken
from horovod_topk.torch_training import momentum
from horovod_topk.torch_training.buckets import Buckets
from horovod_topk.torch_training.clipping_late import LateClipping
from horovod_topk.torch_training.scaling import warn_of_scaler
from horovod_topk.torch_training.stepping import with_one_exchange

LOOKS = 8  # calls of the hook before a step; Horovod's steps make two


class Hooks(abc.ABC):
    """Checks each step of one optimizer, and commits or rolls back what it has applied.

    An adapter says what a step has to find (`_check_before` and others), and where its host
    wraps the optimizer's own step in another one (`_is_around`).

    Args:
        compressor: of its gradients.
        buckets: the same gradients, as they become ready.
        loan: the optimizer's own momentum, if it is corrected instead of it.
        has_scaler: whether the loss's scaler is known.
    """

    late_clipping: LateClipping  # once an optimizer is watched

    def __init__(
        self,
        compressor: Compressor[Tensor],
        buckets: Buckets,
        loan: momentum.Loan | None,
        *,
        has_scaler: bool = False,
    ) -> None:
        self._compressor, self._buckets, self._loan = compressor, buckets, loan
        config = compressor.plan.config
        keeps = config.momentum or config.ratio < 1.0 or config.withheld()
        self._looks = LOOKS if keeps and not has_scaler else 0  # for a scaler, still to be taken
        self._of_scaler: tuple[str, ...] = ()

    def watch(self, optimizer: Any, accumulations: Iterable[tuple[Tensor, Any]]) -> None:
        """Be told of steps and of what gradients are added to.

        accumulations: parameters, and autograd's nodes that add to their gradients.
        """
        factor = self._compressor.plan.config.momentum
        given = 0.0 if self._loan is not None else factor  # users see velocities
        self.late_clipping = LateClipping(optimizer, given, self._buckets)
        if self._loan is not None:
            note_taken(type(optimizer).__name__, factor)
        for p, accumulation in accumulations:
            accumulation.register_prehook(partial(self._before_accumulation, id(p)))
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was warned of."""
        of_loan = () if self._loan is None else self._loan.warnings
        return (*of_loan, *self._of_scaler, *self.late_clipping.warnings)

    def exchanged(self) -> None:
        """Note that all gradients are exchanged: from here on a user may change them."""
        self.late_clipping.begin()

    @abc.abstractmethod
    def _check_before(self, optimizer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Refuse a step on gradients that are not exchanged.

        Raises:
            TopKError: it is one; nothing has changed.
        """

    def _check_closure(self, optimizer: Any) -> None:  # noqa: B027  # not all adapters can
        """As `_check_before`, of gradients that a closure has made, before they are applied."""

    def _check_after(self, optimizer: Any) -> None:  # noqa: B027  # not all adapters have to
        """As `_check_before`, where only the end of a step shows what it has applied."""

    def _is_around(self, optimizer: Any) -> bool:
        """Whether the step that begins exchanges gradients, and then calls the optimizer's own."""
        return False

    def _before_accumulation(self, parameter: int, _: Any) -> None:
        """Refuse to add to an exchanged gradient; one cleared in place is exchanged no more."""
        slot = self._buckets.slots.get(parameter)
        if slot is not None:
            slot.has_fired = True
            if slot.exchanged is not None:
                slot.check_not_exchanged()
                slot.exchanged = None

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Returns what the step is given instead."""
        self._check_before(optimizer, args, kwargs)
        if self._looks:
            self._of_scaler = warn_of_scaler(type(optimizer).__name__)
            self._looks = 0 if self._of_scaler else self._looks - 1
        factor = self._compressor.plan.config.momentum
        if self._loan is not None:
            if self._is_around(optimizer):  # the optimizer's own step comes here once more
                self._loan.take_back(optimizer)  # from a step that has failed
            else:
                self._loan.lend(optimizer)
        elif factor:
            momentum.check_not_twice(optimizer, factor)
        else:
            momentum.give_back(optimizer)
        self._check_clipping(optimizer)
        failed = partial(self._take_back, optimizer)
        check = partial(self._check_closure, optimizer)
        return with_one_exchange(args, kwargs, lambda: self._buckets.exchanges, failed, check)

    def _take_back(self, optimizer: Any) -> None:
        """End what the optimizer did without while it stepped."""
        if self._loan is not None:
            self._loan.take_back(optimizer)

    def _check_clipping(self, optimizer: Any) -> None:
        """Warn of gradients that were changed since they were exchanged."""
        self.late_clipping.check()

    @torch.no_grad()
    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._take_back(optimizer)
        self._check_after(optimizer)
        self._check_clipping(optimizer)  # of a closure that has exchanged within the step
        if self._buckets.are_applied():
            self._compressor.commit()
        else:  # what was exchanged has been thrown away: the step applied something else
            self._compressor.rollback()
        self._buckets.forget_exchanged()
