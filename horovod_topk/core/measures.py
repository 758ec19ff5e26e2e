"""Measures: numbers that ranks tell each other with payloads and sums that travel anyway.

A plan names its measures, 16 at most (`Method.measures`). A rank fills them in when it encodes a
bucket, as float32. Whoever decodes the bucket has those of all ranks, in rank order, on the host:
there they arrive with the flags, which are waited for in any case. Over the buckets of a step they
are added up, in float64 and in the plan's order, so that every rank has the same numbers to the
bit, and `horovod_topk.core.schedule` can decide from them alike on all ranks.

    name        what a rank tells
    gradient    sum of squares of its gradients in this step
    residual    sum of squares of its residuals before this step; of an owner's with the exchange
                "hierarchical"
    exposed     seconds that it waited in collectives in the step before
    step        seconds from the end of the step before that one to its end
    verdict     what its guard says of its own numbers: `horovod_topk.core.guard`

A codec may have measures of its own, which follow these (`Method.measured`): numbers of what it has
encoded, added up over tensors. All others are numbers of the whole rank, such as seconds of the
step before (the argument `number` of `Step`). They are told once, with the first of the plan's
buckets; the others have zeros there.

With the exchange "hierarchical" the ranks that own a shard tell theirs alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from horovod_topk.core.plan import Plan
from horovod_topk.ops import Ops

Array = TypeVar("Array")

GRADIENT, RESIDUAL = "gradient", "residual"
EXPOSED, STEP, VERDICT = "exposed", "step", "verdict"
HOST = (EXPOSED, STEP, VERDICT)  # which the host knows before the step
Rows = Sequence[tuple[float, ...]]  # the measures of each rank, in rank order
Heard = Mapping[str, Sequence[float]]  # by name, one number a rank


def told(
    names: Sequence[str],
    gradients: Sequence[Array],
    residuals: Sequence[Array],
    number: Callable[[str], Any] | None,
    ops: Ops[Array],
) -> list[Any]:
    """What a rank tells with one bucket: a number, or an array of one float32, for each name.

    Args:
        names: of the measures.
        gradients: of the bucket.
        residuals: the arrays that hold the bucket's residuals.
        number: gives those of the whole rank; None: they are told with another bucket.
        ops: of the arrays.
    """
    arrays = {GRADIENT: gradients, RESIDUAL: residuals}
    numbers: list[Any] = []
    for name in names:
        if name in arrays:
            numbers.append(total_of([ops.square(array) for array in arrays[name]]))
        else:
            numbers.append(0.0 if number is None else number(name))
    return numbers


def heard(plan: Plan, by_bucket: Mapping[int, Rows]) -> Heard | None:
    """What all ranks told in a step that has ended; None: not all of it can be used.

    Args:
        plan: of the step.
        by_bucket: the measures of each bucket that was decoded, by its ordinal.
    """
    names, sums = plan.config.measures, list[list[float]]()
    for bucket in plan.buckets:
        rows = by_bucket.get(bucket.ordinal, ())
        if sums and len(rows) != len(sums):
            return None
        before = sums or [[0.0] * len(names) for _ in rows]
        pairs = zip(before, rows, strict=True)
        sums = [[a + b for a, b in zip(*pair, strict=True)] for pair in pairs]
    if not sums or not all(math.isfinite(each) for row in sums for each in row):
        return None
    return {name: [row[i] for row in sums] for i, name in enumerate(names)}


def total_of(arrays: Sequence[Any]) -> Any:
    """The sum of arrays of one number each; 0.0 of none."""
    if not arrays:
        return 0.0
    total = arrays[0]
    for each in arrays[1:]:
        total = total + each
    return total
