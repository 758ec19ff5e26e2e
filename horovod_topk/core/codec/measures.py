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
    verdict     verdict of its guard on its own numbers: `core.control.guard`

A codec may have measures of its own, which follow these (`Method.measured`): numbers computed from
what it encodes, summed over tensors. All others are numbers of the whole rank, such as seconds of
the previous step (the argument `number` of `Step`). A rank sends them with the first of the plan's
buckets; the other buckets have zeros in their place. The last measures of a bucket are those of its
own tensors, if its follower sends any: `core.run.follower`.

With the exchange "hierarchical" only the ranks that own a shard send measures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from horovod_topk.core.plan.buckets import Plan
from horovod_topk.ops import Ops

Array = TypeVar("Array")

GRADIENT, RESIDUAL = "gradient", "residual"
EXPOSED, STEP, VERDICT = "exposed", "step", "verdict"
HOST = (EXPOSED, STEP, VERDICT)  # measures that the host knows before the step
Rows = Sequence[tuple[float, ...]]  # the measures of each rank, in rank order
Measures = Mapping[str, Sequence[float]]  # measure name -> one number for each rank


def own_measures(
    names: Sequence[str],
    gradients: Sequence[Array],
    residuals: Sequence[Array],
    number: Callable[[str], Any] | None,
    ops: Ops[Array],
) -> list[Any]:
    """Measures that a rank sends with one bucket: for each name a number, or a float32 array [1].

    Args:
        names: names of the measures.
        gradients: gradients of the bucket.
        residuals: the arrays that hold the bucket's residuals.
        number: returns a measure of the whole rank; None: another bucket sends these.
        ops: operations on the arrays.
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
    """Measures of all ranks in a finished step; None: some are missing or not finite.

    Args:
        plan: the plan of the step.
        by_bucket: the measures of each decoded bucket, by its ordinal.
    """
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
