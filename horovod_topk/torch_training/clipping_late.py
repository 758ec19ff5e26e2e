"""A warning for SGD whose gradients are clipped after the exchange, though momentum is corrected.

`optimizer.synchronize()`, `clip_grad_norm_` and a step inside `skip_synchronize()` is how Horovod
documents clipping; with DistributedDataParallel it is `clip_grad_norm_` after `backward()`. With
momentum correction `p.grad` holds velocities by then, which are up to 1 / (1 - m) times larger than
gradients, so that a threshold for gradients makes steps that much smaller.

Clipping is noticed as any other change of a gradient is (`ReadyGradient.is_still`).
`GradScaler.unscale_` leaves no trace there, and is no cause for a warning. Adam and the like divide
by the size of what they are given, so only SGD is watched.
"""

from __future__ import annotations

from typing import Any

from torch.optim import SGD

from horovod_topk.core.momentum_takeover import warn_of_clipping
from horovod_topk.torch_training.buckets import Buckets


class LateClipping:
    """Warns once where one optimizer's gradients change between exchange and step.

    Without momentum correction, and after the warning, it does nothing.

    Args:
        optimizer: the distributed optimizer.
        momentum: the momentum that is corrected; 0: none.
        buckets: the optimizer's gradients.
    """

    def __init__(self, optimizer: Any, momentum: float, buckets: Buckets) -> None:
        self._is_watched = bool(momentum) and isinstance(optimizer, SGD)
        self._momentum, self._buckets = momentum, buckets
        self._is_handed_out = False  # gradients are the user's, and not stepped on yet
        self.warnings: tuple[str, ...] = ()  # the one that was given

    def begin(self) -> None:
        """Note that exchanged gradients were handed out."""
        if self._is_watched:
            self._buckets.note_handed_out()
            self._is_handed_out = True

    def check(self) -> None:
        """Warn if a gradient was changed since; called when the optimizer steps."""
        if not self._is_handed_out:
            return
        self._is_handed_out = False
        tensor = self._buckets.first_changed()
        if tensor is not None:
            self._is_watched = False
            changed = f"the gradient of {tensor!r} was changed between its exchange and step()"
            self.warnings = (warn_of_clipping(self._momentum, changed),)
