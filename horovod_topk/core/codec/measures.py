"""Measures: a few float32 numbers that each rank sends to all others with its payloads.

A plan names its measures (`Method.measures`). A rank writes them into a payload when it
encodes a bucket, and reads those of all ranks, in rank order, when it decodes the bucket. They
arrive on the host together with the non-finite flags, so that nothing else has to be waited for.
The measures of a step are summed over its buckets, in float64 and in the plan's order. So every
rank has bitwise the same numbers, and `core.control.schedule` decides the same on all ranks.

    name        number that a rank sends
    gradient    sum of squares of its gradients in this step
    residual    sum of squares of its residuals before this step; of the owner's residuals with the
                exchange "hierarchical"
    exposed     seconds that it waited in collectives in the previous step
    step        seconds that the previous step took, from the end of the step before it
    verdict     what its guard tells: a reported value, or a verdict (`core.control.guard`)

A codec may have measures of its own, which follow these (`Method.measured`): numbers computed from
what it encodes, summed over tensors. All others are numbers of the whole rank, such as seconds of
the previous step (the argument `number` of `Step`). A rank sends them with the first of the plan's
buckets; the other buckets have zeros in their place. The last measures of a bucket are those of its
own tensors, if its follower sends any: `core.run.follower`.

With the exchange "hierarchical" only the ranks that own a shard send measures.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from horovod_topk.core.plan import payload as wire
from horovod_topk.core.plan.buckets import BucketPlan, Plan
from horovod_topk.ops import Ops

Array = TypeVar("Array")

GRADIENT, RESIDUAL = "gradient", "residual"
EXPOSED, STEP, VERDICT = "exposed", "step", "verdict"
HOST = (EXPOSED, STEP, VERDICT)  # measures that the host knows before the step
Rows = Sequence[tuple[float, ...]]  # the measures of each rank, in rank order
Measures = Mapping[str, Sequence[float]]  # measure name -> one number for each rank


@dataclass
class Own(Generic[Array]):
    """The measures that this rank sends with one bucket."""

    given: Sequence[Any] | None = None  # the schedule's and the guard's; None: zeros
    of_pieces: list[Sequence[Array]] = field(default_factory=list)  # the method's, for each piece
    of_tensors: Callable[[], Array] | None = None  # the follower's
    written: set[bytes] = field(default_factory=set)  # payloads that have them, by fingerprint


class MeasureStore(Generic[Array]):
    """What ranks tell each other with their payloads: facts, measures, and numbers of tensors.

    Attributes:
        facts: what this rank states in the step that begins, by the ordinal of the bucket that
            states it, the plan's first: the number of `core.plan.facts` as 4 bytes, in a graph a
            uint8 array.
        own: the measures that this rank sends, by the bucket's ordinal.
        arrived: the measures of all ranks that arrived last with each bucket, by its ordinal.
        tensor_numbers: the numbers of `set_tensor_numbers` that arrived last, by the bucket's
            ordinal: bytes of float32, a row a rank.
    """

    def __init__(self, ops: Ops[Array], arrived: dict[int, Rows] | None = None) -> None:
        self._ops = ops
        self.arrived: dict[int, Rows] = {} if arrived is None else arrived
        self.tensor_numbers: dict[int, Array] = {}
        self.own: dict[int, Own[Array]] = {}
        self.facts: Mapping[int, bytes | Array] = {}

    def set(self, bucket: BucketPlan, numbers: Sequence[Any]) -> None:
        """Set the measures that this rank sends with a bucket, in this step and later ones.

        numbers: one for each of the settings' `needed_measures`.
        """
        self._renewed(bucket).given = numbers

    def set_tensor_numbers(self, bucket: BucketPlan, numbers: Callable[[], Array]) -> None:
        """Set the numbers that this rank sends about a bucket's tensors in the step that begins.

        numbers: returns them, flat; called once the bucket is encoded.
        """
        self._renewed(bucket).of_tensors = numbers

    def _renewed(self, bucket: BucketPlan) -> Own[Array]:
        own = self.own.setdefault(bucket.ordinal, Own())
        own.of_pieces.clear()
        own.written.clear()
        return own

    def add(self, bucket: BucketPlan, found: Sequence[Array]) -> None:
        """Note the method's own measures of one piece."""
        if found and bucket.ordinal in self.own:
            self.own[bucket.ordinal].of_pieces.append(found)

    def write(self, bucket: BucketPlan, own: Own[Array], payload: Array) -> None:
        """Write measures of this rank into a payload that is encoded and has not these yet."""
        own.written.add(bucket.fingerprint)
        self._store(bucket, own, payload, wire.HEADER_BYTES)

    def write_facts(self, bucket: BucketPlan, payload: Array) -> None:
        """Write this rank's facts into a payload of the bucket that states them."""
        facts = self.facts[bucket.ordinal]
        if isinstance(facts, bytes):
            self._ops.store_bytes(payload, wire.FACTS_AT, facts)
        else:
            self._ops.store(payload, wire.FACTS_AT, facts)

    def data(self, bucket: BucketPlan) -> Array:
        """This rank's measures of an encoded bucket, as the uint8 bytes of a payload."""
        data = self._ops.zeros(wire.MEASURE * len(bucket.measures), "uint8", bucket.device)
        self._store(bucket, self.own.get(bucket.ordinal, Own()), data, 0)
        return data

    def _store(self, bucket: BucketPlan, own: Own[Array], data: Array, at: int) -> None:
        """Write this rank's measures to uint8 bytes, from `at` on."""
        ops, count = self._ops, len(bucket.measures) - bucket.tensor_measures
        given = [0.0] * (count - len(bucket.config.measured)) if own.given is None else own.given
        given = [*given, *(total_of(each) for each in zip(*own.of_pieces, strict=True))]
        numbers = [each if isinstance(each, float) else 0.0 for each in given]
        if numbers:
            ops.store_bytes(data, at, struct.pack(f"<{len(given)}f", *numbers))
        for i, each in enumerate(given):
            if not isinstance(each, float):
                ops.store(data, at + wire.MEASURE * i, ops.pack_values(each, "float32"))
        if bucket.tensor_measures and own.of_tensors is not None:
            last = ops.pack_values(own.of_tensors(), "float32")
            ops.store(data, at + wire.MEASURE * len(given), last)

    def read_tensor_numbers(self, bucket: BucketPlan, gathered: Array) -> None:
        """Read the numbers that a bucket's payloads carry for each tensor."""
        count, width = bucket.tensor_measures, bucket.layout.payload_bytes // bucket.writers
        at = wire.HEADER_BYTES + wire.MEASURE * (len(bucket.measures) - count)
        self.tensor_numbers[bucket.ordinal] = self._ops.load(
            gathered, width, at, wire.MEASURE * count
        )


def own_measures(
    names: Sequence[str],
    gradients: Sequence[Array],
    residuals: Sequence[Array],
    number: Callable[[str], Any] | None,
    ops: Ops[Array],
) -> list[Any]:
    """Measures that a rank sends with one bucket: for each name a number, or a float32 array [1].

    number: returns a measure of the whole rank; None: another bucket sends these.
    """
    arrays = {GRADIENT: gradients, RESIDUAL: residuals}
    numbers: list[Any] = []
    for name in names:
        if name in arrays:
            numbers.append(total_of([ops.square(array) for array in arrays[name]]))
        else:
            numbers.append(0.0 if number is None else number(name))
    return numbers


def all_measures(plan: Plan, by_bucket: Mapping[int, Rows]) -> Measures | None:
    """Measures of all ranks in a finished step; None: some are missing or not finite."""
    names, sums = plan.config.measures, list[list[float]]()
    for bucket in plan.buckets:
        rows = by_bucket.get(bucket.ordinal, ())
        if sums and len(rows) != len(sums):
            return None
        before = sums or [[0.0] * len(names) for _ in rows]
        pairs = zip(before, rows, strict=True)
        sums = [[a + b for a, b in zip(*pair, strict=False)] for pair in pairs]
    if not sums or not all(math.isfinite(each) for row in sums for each in row):
        return None
    return {name: [row[i] for row in sums] for i, name in enumerate(names)}


def total_of(arrays: Sequence[Any]) -> Any:
    """Sum of arrays that hold one number each; 0.0 if there are none."""
    if not arrays:
        return 0.0
    total = arrays[0]
    for each in arrays[1:]:
        total = total + each
    return total
