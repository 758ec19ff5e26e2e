"""A probe: one bucket's dense gradient, exchanged beside its compressed payload.

It measures how compression changes the applied gradient, at the cost of one more collective and a
copy of the bucket. Every rank probes the same bucket in the same step, as both follow from the
count of committed steps: one step in `every`, and one bucket after another.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from horovod_topk.core.exchange.protocol import Collective, Pending
from horovod_topk.core.plan.buckets import Plan
from horovod_topk.ops import Ops

Array = TypeVar("Array")


@dataclass(frozen=True)
class Probed:
    """How far a bucket's exchanged gradient is from the dense one."""

    probe_cosine: float | None = None  # cosine of their angle; None: one of them is 0
    probe_error: float | None = None  # norm of their difference / norm of the dense gradient


class Probe(Generic[Array]):
    """Exchanges one bucket dense, in one step out of `every`."""

    def __init__(self, every: int, collective: Collective[Array], ops: Ops[Array], name: str):
        self._every, self._collective, self._ops, self._name = every, collective, ops, name
        self._pending: Pending[Array] | None = None
        self._ordinal: int | None = None  # the bucket that is probed in this step
        self.result = Probed()  # the result of the last probe

    def choose(self, plan: Plan, committed: int) -> None:
        """Select the bucket that is probed in the step that begins, if any.

        committed: number of committed steps.
        """
        count, rest = divmod(committed, self._every)
        self._reduction = plan.reduction
        self._ordinal = None if rest else plan.buckets[count % len(plan.buckets)].ordinal

    def begin(self, ordinal: int, gradients: Sequence[Array]) -> None:
        """Start to add up a copy of a bucket's gradients, if it is the probed one."""
        if self._ordinal != ordinal:
            return
        self.drain()
        name = f"{self._name}.probe.{ordinal}"
        self._pending = self._collective.allreduce(self._flat(gradients), name)

    def finish(self, ordinal: int, exchanged: Sequence[Array], gain: float) -> None:
        """Compare a bucket's exchanged gradients, scaled by `gain`, with its dense ones."""
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
        """Wait for a running collective, and drop its result."""
        if self._pending is not None:
            self._pending.wait()
        self._pending = None

    def _flat(self, arrays: Sequence[Array]) -> Any:
        """A bucket's gradients in one float32 array."""
        ops, parts = self._ops, list[Array]()
        for array in arrays:
            part = ops.zeros(ops.numel(array), "float32", ops.device(array))
            ops.compensate(part, array, part)
            parts.append(part)
        return ops.joined(parts)


def compare(dense: float, applied: float, difference: float) -> Probed:
    """Cosine and error from sums of squares: dense gradient, applied gradient, their difference."""
    if not all(map(math.isfinite, (dense, applied, difference))) or dense <= 0.0:
        return Probed()
    both = 2.0 * math.sqrt(dense * applied)
    cosine = max(-1.0, min(1.0, (dense + applied - difference) / both)) if both else None
    return Probed(cosine, math.sqrt(difference / dense))
