"""A probe: one bucket's dense gradient, exchanged beside what was compressed of it.

It measures what compression does to the gradient that is applied, with one collective more and a
copy of the bucket. Every rank probes the same bucket in the same step, as both follow from the
count of committed steps: one of `probe_every` steps, and the buckets in turn.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from horovod_topk.core.exchange import Collective, Pending
from horovod_topk.core.plan import Plan
from horovod_topk.ops import Ops

Array = TypeVar("Array")


@dataclass(frozen=True)
class Probed:
    """How far a bucket's exchanged gradient is from the dense one."""

    probe_cosine: float | None = None  # of the angle between them; None: one of them is 0
    probe_error: float | None = None  # norm of their difference over that of the dense one


class Probe(Generic[Array]):
    """Exchanges one bucket dense in one of so many steps.

    Args:
        every: steps.
        collective: among the ranks that exchange.
        ops: of the arrays.
        name: prefix of the collectives' names, equal on all ranks.
    """

    def __init__(self, every: int, collective: Collective[Array], ops: Ops[Array], name: str):
        self._every, self._collective, self._ops, self._name = every, collective, ops, name
        self._pending: Pending[Array] | None = None
        self._ordinal: int | None = None  # of the bucket that is probed in this step
        self.result = Probed()  # of the last bucket

    def turn(self, plan: Plan, committed: int) -> None:
        """Say which bucket is probed in the step that begins, if one is.

        committed: steps before this one.
        """
        turn, rest = divmod(committed, self._every)
        self._reduction = plan.reduction
        self._ordinal = None if rest else plan.buckets[turn % len(plan.buckets)].ordinal

    def begin(self, ordinal: int, gradients: Sequence[Array]) -> None:
        """Start to add up a bucket's gradients, if its turn has come; they are copied."""
        if self._ordinal != ordinal:
            return
        self.drain()
        name = f"{self._name}.probe.{ordinal}"
        self._pending = self._collective.allreduce(self._flat(gradients), name)

    def finish(self, ordinal: int, exchanged: Sequence[Array], gain: float) -> None:
        """Compare a bucket's exchanged gradients, `gain` times the applied, with its dense ones."""
        if self._ordinal != ordinal or self._pending is None:
            return
        ops, total = self._ops, self._pending.wait()
        self._pending = None
        scale = gain / self._collective.size if self._reduction == "average" else gain
        dense: Any = ops.clone(total)
        ops.write_scaled(ops.clone(total), scale, dense, False)
        applied = self._flat(exchanged)
        squares = ops.joined([ops.square(each) for each in (dense, applied, applied - dense)])
        data = ops.to_host(ops.pack_values(squares, "float32"))
        self.result = compare(*struct.unpack("<3f", data))

    def drain(self) -> None:
        """Wait for what is under way, and forget it."""
        if self._pending is not None:
            self._pending.wait()
        self._pending = None

    def _flat(self, arrays: Sequence[Array]) -> Any:
        """A bucket's gradients behind each other, in float32."""
        ops, parts = self._ops, list[Array]()
        for array in arrays:
            part = ops.zeros(ops.numel(array), "float32", ops.device(array))
            ops.compensate(part, array, part)
            parts.append(part)
        return ops.joined(parts)


def compare(dense: float, applied: float, difference: float) -> Probed:
    """What sums of squares say: of the dense gradient, of the applied one, of their difference."""
    if not all(map(math.isfinite, (dense, applied, difference))) or dense <= 0.0:
        return Probed()
    both = 2.0 * math.sqrt(dense * applied)
    cosine = max(-1.0, min(1.0, (dense + applied - difference) / both)) if both else None
    return Probed(cosine, math.sqrt(difference / dense))
