"""`Norms` finds gradients that are suddenly large; see SGD in `horovod_topk.core.arrivals`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from horovod_topk.core.arrivals import FACTORS, NORM_RATE, NORMS, SPIKE, followed
from horovod_topk.core.plan import BucketPlan
from horovod_topk.core.residual import Arenas
from horovod_topk.core.samples import Sample, constants
from horovod_topk.ops import Ops
from horovod_topk.ops.coding import LIMIT

Array = TypeVar("Array")

TINY = 2.0**-100  # factor of a tensor whose norm overflows; 0 is that of one without a step


class Norms(Generic[Array]):
    """Follows the norms of the exchanged gradients of one bucket, step after step.

    Args:
        bucket: the bucket.
        states: arenas of the states, by name.
        ops: operations on the arrays.
    """

    def __init__(
        self, bucket: BucketPlan, states: Mapping[str, Arenas[Array]], ops: Ops[Array]
    ) -> None:
        self._bucket, self._states, self._ops = bucket, states, ops
        self._positions = followed(bucket.gradients)
        sizes = [bucket.gradients[at].spec.numel for at in self._positions]
        self._samples = [Sample(numel) for numel in sizes]
        pairs = zip(sizes, self._samples, strict=True)
        self._places = tuple((0, 0, numel, *each.pick) for numel, each in pairs)
        self._scales: Any = constants([1.0 / each.share for each in self._samples], bucket, ops)

    def limit(self, exchanged: Sequence[Array], gain: float) -> None:
        """Scale gradients down that are suddenly large, and follow the means of their norms.

        Args:
            exchanged: the gradients of all ranks, times `gain`; they are written.
            gain: factor of the exchanged gradients.
        """
        tensors = [exchanged[at] for at in self._positions]
        means, factors = self._states[NORMS], self._states[FACTORS].candidate
        pair, numbers = (means.residual, means.candidate), (NORM_RATE, SPIKE)
        found = tensors, self._places, self._scales, gain, pair, factors, numbers
        if not self._ops.spikes(*found):
            self._follow(tensors, gain)
        self._ops.limit(tensors, factors)

    def _follow(self, tensors: Sequence[Array], gain: float) -> None:
        """Compute the mean norms after this step, and this step's factors, without a kernel."""
        ops, dtype, means = self._ops, self._bucket.residual_dtype, self._states[NORMS]
        sampled: Any = ops.blocks(tensors, [each.pick for each in self._samples], dtype)
        if gain != 1.0:
            sampled = sampled * (1.0 / gain)
        sums: Any = ops.segment_sums(sampled * sampled, [each.size for each in self._samples])
        scaled: Any = sums * self._scales
        roots: Any = ops.root(ops.cast(ops.finite(scaled), "float64"))
        norms: Any = ops.cast(ops.cast(roots, "float32"), dtype)
        before: Any = means.residual
        is_known: Any = ops.cast(before > 0.0, dtype)
        counts: Any = ops.cast(norms > 0.0, dtype)  # n waits while gradients are 0
        rates = is_known * (NORM_RATE - 1.0) + 1.0
        after: Any = before + (norms - before) * rates * counts
        ops.assign(means.candidate, ops.finite(after))
        allowed: Any = ops.cast(ops.finite(ops.divided(before * SPIKE, norms)), dtype)
        # min(1, allowed) is exact: it is 1 where the difference is not negative.
        is_spike: Any = ops.cast(allowed < 1.0, dtype) * is_known * counts
        is_over: Any = ops.cast(scaled > LIMIT, dtype) * is_known  # |G| overflows
        factors = ((allowed - 1.0) * is_spike + 1.0) * (is_over * -1.0 + 1.0) + is_over * TINY
        ops.assign(self._states[FACTORS].candidate, factors)

    def swap(self) -> None:
        """Make the states of the next step the present ones."""
        for name in (NORMS, FACTORS):
            self._states[name].swap()
