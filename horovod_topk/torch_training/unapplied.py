"""A warning for exchanges that no step of the optimizer applies.

A step that PyTorch's hooks do not see, or that finds no gradients, looks like a step that was
skipped: residuals stay as they were, and what was sent is sent again. If that goes on, there is no
error feedback. A single skipped step is no fault, and steps with a NaN or an infinity are counted
by their own means (`Stats.rolled_back`, the guard).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

from horovod_topk.core.run.counting import Counting
from horovod_topk.core.run.optimizers import kind_of
from horovod_topk.torch_training.stepping import takes_back

log = logging.getLogger("horovod_topk")

LOOKED_AT = 16  # exchanges that ended last
MANY = 8  # of them that were not applied
APPLIED, CLEARED, UNSEEN = "applied", "cleared", "unseen"  # how an exchange ended

_CURES = {
    CLEARED: "When step() was called, the gradients were None or zeros. Clear them after the step, "
    "not between backward() and step()",
    UNSEEN: "No step() was seen between them{replaced}. Weights that are updated by hand, or by a "
    "step() that does not call the optimizer's own, train without error feedback: let the "
    "optimizer step, or do not compress",
    APPLIED: "Other exchanges between them were. If another loss's backward() runs through these "
    "parameters, as that of a GAN's generator does through its discriminator, these exchanges are "
    "in vain: freeze the parameters meanwhile (requires_grad_(False), and with "
    "DistributedDataParallel call model.module), or run that pass inside no_sync(). If that "
    "backward() belongs to the step, as SAM's first one does, all is well",
}


class Unapplied:
    """Warns once if half of the last exchanges were not applied.

    Args:
        optimizer: the optimizer of the gradients.
        counts: counts its steps.
        names: names of its tensors.
    """

    def __init__(self, optimizer: Any, counts: Counting[Any], names: Sequence[str]) -> None:
        self._counts = counts
        self._kind = f"{kind_of(optimizer)} ({len(names)} tensors, such as {names[0]!r})"
        self._own = vars(optimizer)  # the instance's own attributes
        self._before = counts.steps, counts.unapplied
        self._ended: deque[str] = deque(maxlen=LOOKED_AT)
        self._is_over = takes_back(optimizer)  # two exchanges a step are no fault
        self.warnings: tuple[str, ...] = ()

    def note(self, how: str) -> None:
        """Count the exchanges that have ended since the last call.

        how: `CLEARED` or `UNSEEN`, for those that were not applied.
        """
        before, self._before = self._before, (self._counts.steps, self._counts.unapplied)
        if self._is_over or before == self._before:
            return
        applied, unapplied = (now - then for now, then in zip(self._before, before, strict=True))
        self._ended.extend([APPLIED] * applied + [how] * unapplied)
        missed = [each for each in self._ended if each != APPLIED]
        if len(missed) >= MANY:
            self._is_over, self.warnings = True, (self._text(missed),)
            log.warning("%s", self.warnings[0])

    def _text(self, missed: list[str]) -> str:
        replaced = ""
        if (step := self._own.get("step")) is not None:
            name = getattr(step, "__qualname__", type(step).__name__)
            replaced = f", and the optimizer's step was replaced by {name}"
        cause = CLEARED if missed.count(CLEARED) > len(missed) // 2 else UNSEEN
        if cause == UNSEEN and APPLIED in self._ended:
            cause = APPLIED
        return (
            f"TopKEF: {len(missed)} of the last {len(self._ended)} exchanges of {self._kind} were "
            "not applied by a step of it, so that what they sent is sent again. "
            + _CURES[cause].format(replaced=replaced)
        )
