"""`horovod_topk.torch_training.hooks` for an optimizer that Horovod has wrapped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from horovod_topk.torch.stepping import check_after, check_before
from horovod_topk.torch_training import hooks


class Hooks(hooks.Hooks):
    """Step hooks for Horovod, whose step exchanges late gradients, then steps the optimizer."""

    _has_exchanged = False  # since the last step

    def exchanged(self) -> None:
        """As `hooks.Hooks.exchanged`: `synchronize()` is over."""
        self._has_exchanged = True
        self._buckets.note_handed_out()
        super().exchanged()

    def _check_before(self, optimizer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        check_before(optimizer, args, kwargs)

    def _check_after(self, optimizer: Any) -> None:
        self._has_exchanged = False
        check_after(optimizer)

    def _is_around(self, optimizer: Any) -> bool:
        if not optimizer._should_synchronize:  # Horovod's step sets it to False
            return bool(optimizer._synchronized)
        waits = optimizer._synchronized or optimizer._handles
        return bool(waits or not self._has_exchanged)

    def _check_clipping(self, optimizer: Any) -> None:
        """Check for late clipping, unless `step()` itself exchanges the gradients."""
        if not optimizer._should_synchronize:
            super()._check_clipping(optimizer)
