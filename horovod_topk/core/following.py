"""`Following` computes how often elements arrive; see `horovod_topk.core.arrivals`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from horovod_topk.core.arrivals import RATE
from horovod_topk.core.residual import Arenas
from horovod_topk.ops import Ops

Array = TypeVar("Array")


class Following(Generic[Array]):
    """Follows the arrivals phi of one bucket, step after step.

    Args:
        arrivals: arenas of phi.
        ops: operations on the arrays.
        everything: whether all elements arrive, whatever their value, so that phi is 1.
    """

    def __init__(self, arrivals: Arenas[Array], ops: Ops[Array], *, everything: bool) -> None:
        self._arrivals, self._ops, self._everything = arrivals, ops, everything

    def finish(self, exchanged: Sequence[Array]) -> None:
        """Compute phi after a step, once the bucket's gradients are exchanged."""
        before: Any = self._arrivals.residual
        if self._everything:
            self._ops.assign(self._arrivals.candidate, before * 0.0 + 1.0)
        else:
            self._ops.follow(before, RATE, exchanged, self._arrivals.candidate)

    def swap(self) -> None:
        """Make phi after the step the present one."""
        self._arrivals.swap()

    def latest(self, *, committed: bool) -> dict[str, Array]:
        """Return phi of each element after the last step: a flat array for each tensor name.

        committed: whether that step is committed.
        """
        views = self._arrivals.views(self._ops, candidate=not committed)
        pairs = zip(self._arrivals.plan.tensors, views, strict=True)
        return {tensor.spec.name: view for tensor, view in pairs if tensor.numel}
