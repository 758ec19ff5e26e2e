"""PyTorch hooks of one optimizer: before gradients are accumulated, and around its steps."""

from __future__ import annotations

import abc
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from horovod_topk.core.run.compressor import Compressor
from horovod_topk.torch_training import momentum
from horovod_topk.torch_training.buckets import Buckets, Use
from horovod_topk.torch_training.clipping_late import LateClipping
from horovod_topk.torch_training.scaling import warn_of_scaler
from horovod_topk.torch_training.stepping import closure_of, with_one_exchange
from horovod_topk.torch_training.tracing import untraced
from horovod_topk.torch_training.unapplied import CLEARED, UNSEEN, Unapplied
from horovod_topk.torch_training.updates import Updates, applies_nothing

LOOKS = 8  # calls of the hook that look for a loss scaler; each Horovod step makes two calls


class Hooks(abc.ABC):
    """Checks each step of one optimizer, and commits or rolls back its compression.

    An adapter's subclass checks that a step has exchanged gradients (`_check_before` and others),
    and says whether a step wraps the optimizer's own step (`_is_around`).

    Args:
        compressor: the compressor of the optimizer's gradients.
        buckets: the same gradients, as they become ready.
        updates: its updates, if they depend on the exchange.
        has_scaler: whether the loss's scaler is known.
    """

    late_clipping: LateClipping  # set by `watch`
    _unapplied: Unapplied  # the same

    def __init__(
        self,
        compressor: Compressor[Tensor],
        buckets: Buckets,
        updates: Updates | None,
        *,
        has_scaler: bool = False,
    ) -> None:
        self._compressor, self._buckets = compressor, buckets
        self._updates = updates
        self._updated = 0  # number of exchanges when an update last began
        self._is_updating = False  # until that step has ended
        self._before: Any = None  # the handle of `_before_step`
        self._use: Use | None = None  # what the present step uses of the exchanged gradients
        config = compressor.plan.config
        keeps = config.momentum or config.ratio < 1.0 or config.withheld()
        self._looks = LOOKS if keeps and not has_scaler else 0  # calls left that look for a scaler
        self._of_scaler: tuple[str, ...] = ()
        self._handles: list[Any] = []  # of the registered hooks

    def watch(self, optimizer: Any, accumulations: Iterable[tuple[Tensor, Any]]) -> None:
        """Register the hooks on an optimizer and on the accumulation of its gradients.

        accumulations: parameters, and autograd's nodes that accumulate their gradients.
        """
        factor = self._compressor.plan.config.momentum
        self.late_clipping = LateClipping(optimizer, factor, self._buckets)
        names = [slot.spec.name for slot in self._buckets.slots.values()] or [""]
        self._optimizer: Callable[[], Any] = weakref.ref(optimizer)
        self._unapplied = Unapplied(optimizer, self._compressor, names)
        for p, accumulation in accumulations:
            before = partial(self._before_accumulation, id(p))
            self._handles.append(accumulation.register_prehook(before))
        self._before = optimizer.register_step_pre_hook(self._before_step)
        self._handles.append(self._before)
        if hasattr(optimizer, "register_state_dict_pre_hook"):  # PyTorch 2.1
            self._handles.append(optimizer.register_state_dict_pre_hook(self._undo))
        after = optimizer.register_step_post_hook(self._after_step)
        # Before the hooks that a user has registered: they should see the gradients.
        _move(optimizer, "_optimizer_step_post_hooks", after, last=False)
        self._handles.append(after)

    def remove(self) -> None:
        """Remove the hooks: the optimizer's gradients are no longer compressed."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def warnings(self) -> tuple[str, ...]:
        """Texts of the warnings given."""
        late = self.late_clipping.warnings
        return (*self._of_scaler, *late, *self._unapplied.warnings)

    def exchanged(self) -> None:
        """Note that all gradients are exchanged, so that a user may change them from now on."""
        self.late_clipping.begin()
        self._unapplied.note(UNSEEN)
        if self._updates is not None and (optimizer := self._optimizer()) is not None:
            # This hook runs after the user's own hooks: those should see the gradients.
            _move(optimizer, "_optimizer_step_pre_hooks", self._before, last=True)

    @abc.abstractmethod
    def _check_before(self, optimizer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Refuse a step on gradients that are not exchanged.

        Raises:
            TopKError: the gradients are not exchanged; nothing has changed.
        """

    def _check_closure(self, optimizer: Any) -> None:  # noqa: B027  # not all adapters can
        """As `_check_before`, for gradients computed by a closure, before they are applied."""

    def _check_after(self, optimizer: Any) -> None:  # noqa: B027  # not all adapters have to
        """As `_check_before`, for checks that are only possible at the end of a step."""

    def _is_around(self, optimizer: Any) -> bool:
        """Whether this `step` exchanges gradients and then calls the optimizer's own `step`."""
        return False

    @untraced
    def _before_accumulation(self, parameter: int, _: Any) -> None:
        """Refuse to add to an exchanged gradient, unless it was zeroed in place."""
        if self._is_updating:  # a step has raised, and a user may have zeroed what it has hidden
            assert self._updates is not None
            self._updates.forget()
            self._updated, self._is_updating = -1, False
        slot = self._buckets.slots.get(parameter)
        if slot is not None:
            slot.has_fired = True
            if slot.exchanged is not None:
                slot.check_not_exchanged()
                slot.exchanged = None

    @untraced
    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Check a step before it runs; returns the arguments that the step gets instead."""
        self._undo()
        self._check_before(optimizer, args, kwargs)
        if self._looks:
            self._of_scaler = warn_of_scaler(type(optimizer).__name__)
            self._looks = 0 if self._of_scaler else self._looks - 1
        factor = self._compressor.plan.config.momentum
        if factor:
            momentum.check_not_twice(optimizer, factor)
        else:
            momentum.give_back(optimizer)
        self._check_clipping(optimizer)
        self._use = None
        if closure_of(args, kwargs) is None and not self._is_around(optimizer):
            self._begin(optimizer)
        check = partial(self._after_closure, optimizer)
        return with_one_exchange(args, kwargs, lambda: self._buckets.exchanges, check)

    def _after_closure(self, optimizer: Any) -> None:
        """Check what a closure has computed, and begin the step with it."""
        self._undo()  # Horovod's step and the optimizer's own both come here
        self._check_closure(optimizer)
        self._begin(optimizer)

    def _begin(self, optimizer: Any) -> None:
        """Note what the step uses, which may clear gradients, and begin its updates.

        They take the place of the optimizer's own once for each exchange.
        """
        self._use = None
        if not applies_nothing(optimizer):
            zeros = self._compressor.config.may_send_nothing
            self._use = self._buckets.use_of(optimizer, with_zeros=zeros)
        exchanges = self._buckets.exchanges
        if self._updates is not None and exchanges != self._updated:
            self._is_updating = True
            self._updates.begin(optimizer)
            self._updated = exchanges

    @untraced
    def _undo(self, *_: Any) -> None:
        """Show the gradients that a step which has raised has left hidden."""
        if self._is_updating:
            assert self._updates is not None
            self._updates.undo()
            self._updated, self._is_updating = -1, False

    def _check_clipping(self, optimizer: Any) -> None:
        """Warn of gradients that were changed after their exchange."""
        self.late_clipping.check()

    @untraced
    @torch.no_grad()
    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._is_updating:
            assert self._updates is not None
            self._updates.end(optimizer)
            self._is_updating = False
        self._check_after(optimizer)
        self._check_clipping(optimizer)  # if a closure has exchanged within the step
        use, self._use = self._use, None
        try:
            if use is not None:
                self._compressor.commit(use.without, use.frozen)
            else:  # the step applied other gradients than the exchanged ones, or none
                self._compressor.rollback()
        finally:  # a user's callback may raise
            self._buckets.forget_exchanged()
        self._unapplied.note(CLEARED)


def _move(optimizer: Any, hooks: str, handle: Any, *, last: bool) -> None:
    """Move a hook behind those of the same kind, or before them."""
    registered = getattr(optimizer, hooks, None)
    if isinstance(registered, OrderedDict) and handle.id in registered:  # PyTorch's own
        registered.move_to_end(handle.id, last=last)
