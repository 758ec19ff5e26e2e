"""A warning for SGD: gradients were clipped after the exchange, and momentum is corrected.

Horovod documents clipping as `optimizer.synchronize()`, `clip_grad_norm_` and a step inside
`skip_synchronize()`; with DistributedDataParallel, `clip_grad_norm_` follows `backward()`. With
momentum correction `p.grad` holds velocities by then, which are up to 1 / (1 - m) times larger than
gradients, so that a threshold for gradients makes steps that much smaller.

Clipping is noticed like any other change of a gradient (`Slot.is_still`). `GradScaler.unscale_`
leaves the version as it is, and causes no warning. Adam and similar optimizers divide by the
magnitude of their gradients, so only SGD is checked.
"""

from __future__ import annotations

from typing import Any

from torch.optim import SGD

from horovod_topk.core.run.optimizers import warn_of_clipping
from horovod_topk.torch_training.buckets import Buckets


class LateClipping:
    """Warns once if an optimizer's gradients change between exchange and step.

    Without momentum correction, and after the warning, it does nothing.

    Args:
        optimizer: the distributed optimizer.
        momentum: the momentum that is corrected; 0: none.
        buckets: the buckets of the optimizer's gradients.
    """

    def __init__(self, optimizer: Any, momentum: float, buckets: Buckets) -> None:
        self._is_watched = bool(momentum) and isinstance(optimizer, SGD)
        self._momentum, self._buckets = momentum, buckets
        self._is_handed_out = False  # exchanged, and not applied by a step yet
        self.warnings: tuple[str, ...] = ()

    def begin(self) -> None:
        """Note that the exchanged gradients were written to the parameters."""
        self._is_handed_out = self._is_watched

    def check(self) -> None:
        """Warn if an exchanged gradient was changed; called when the optimizer steps."""
        if not self._is_handed_out:
            return
        self._is_handed_out = False
        tensor = self._buckets.first_changed()
        if tensor is not None:
            self._is_watched = False
            changed = f"the gradient of {tensor!r} was changed between its exchange and step()"
            self.warnings = (warn_of_clipping(self._momentum, changed),)
