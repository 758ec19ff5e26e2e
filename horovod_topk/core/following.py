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
        arenas = self._arrivals
        befores, afters = self._views(arenas.residual), self._views(arenas.candidate)
        for at, before, after in zip(
            self._positions, befores.values(), afters.values(), strict=True
        ):
            if self._everything:
                phi: Any = before
                self._ops.assign(after, phi * 0.0 + 1.0)
            else:
                self._ops.follow(before, RATE, exchanged[at], after)

    def swap(self) -> None:
        """Make phi after the step the present one."""
        self._arrivals.swap()

    def latest(self, *, committed: bool) -> dict[str, Array]:
        """Return phi of each element after the last step: a flat array for each tensor name.

        committed: whether that step is committed.
        """
        return self._views(self._arrivals.residual if committed else self._arrivals.candidate)

    @property
    def _positions(self) -> list[int]:
        """Positions in the bucket of the tensors that have elements."""
        return [at for at, each in enumerate(self._arrivals.plan.tensors) if each.numel]

    def _views(self, array: Array) -> dict[str, Array]:
        tensors = self._arrivals.plan.tensors
        return {
            each.spec.name: self._ops.view(array, each.start, each.stop)
            for each in (tensors[at] for at in self._positions)
        }
