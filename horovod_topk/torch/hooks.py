"""Step hooks for an optimizer that Horovod has wrapped: all gradients were exchanged.

Horovod's step exchanges late gradients, and then calls the optimizer's own step. Ranks that step on
local gradients diverge silently. Each check raises before the step has changed anything, except
`check_after`, which finds gradients that a closure computed within the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from horovod_topk.errors import StepBeforeSynchronizeError
from horovod_topk.torch_training import steps

_CURE = (
    "Call optimizer.synchronize() at the end of the closure, and step inside "
    "optimizer.skip_synchronize()"
)


class Hooks(steps.Hooks):
    """Step hooks that also check that Horovod has exchanged, or will exchange, the gradients."""

    _has_exchanged = False  # since the last step

    def exchanged(self) -> None:
        """As `steps.Hooks.exchanged`: `synchronize()` is over."""
        self._has_exchanged = True
        self.buckets.note_handed_out()
        super().exchanged()

    def check_before(self, optimizer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """As `steps.Hooks.check_before`."""
        if not optimizer._should_synchronize:
            if optimizer._handles:
                raise StepBeforeSynchronizeError(
                    "step() was called inside skip_synchronize() on gradients that have not been "
                    "exchanged",
                    cure="Call optimizer.synchronize() after backward() and before this step",
                )
        elif steps.closure_of(args, kwargs) is not None:
            raise StepBeforeSynchronizeError(
                "step(closure) exchanges gradients before it calls the closure, and would apply "
                "those that the closure makes unexchanged",
                cure=_CURE,
            )
        check_all_are_known(optimizer)

    def check_after(self, optimizer: Any) -> None:
        """As `steps.Hooks.check_after`: a closure's gradients were applied unexchanged."""
        self._has_exchanged = False
        if optimizer._handles:
            raise StepBeforeSynchronizeError(
                "a closure made gradients that were applied before they were exchanged, and ranks "
                "differ from here on",
                cure=_CURE,
            )

    def is_around(self, optimizer: Any) -> bool:
        """As `steps.Hooks.is_around`."""
        if not optimizer._should_synchronize:  # Horovod's step sets it to False
            return bool(optimizer._synchronized)
        waits = optimizer._synchronized or optimizer._handles
        return bool(waits or not self._has_exchanged)

    def check_clipping(self, optimizer: Any) -> None:
        """As `steps.Hooks.check_clipping`, unless `step()` itself exchanges the gradients."""
        if not optimizer._should_synchronize:
            super().check_clipping(optimizer)


def check_all_are_known(optimizer: Any) -> None:
    """Refuse gradients of parameters without hooks, as they were frozen at construction."""
    known = {id(p) for p in optimizer._requires_update}
    steps.check_all_are_known(optimizer, known, lambda: optimizer._parameter_names)
