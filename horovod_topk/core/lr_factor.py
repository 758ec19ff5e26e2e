"""A factor that lowers the learning rate of Adam and AdamW while their steps overshoot.

Adam divides by the root of a mean square of the gradients that it gets. A residual adds up what
was not sent, so that quick changes of a gradient cancel out before they are sent. The mean square
misses them, and near the largest learning rate at which dense training is stable, steps are too
large: parameters swing to and fro, and each exchanged gradient points against the one before. Their
cosine shows it:

    c' = c + (cosine - c) / 20              running mean over steps, on each rank
    f  = 1 / (1 + 50 max(0, -c' - 0.01))    factor of the learning rate, c' the mean over ranks

A cosine counts as 0.2 or -0.2 at most, so that a short swing, as at the beginning of warm-up, does
not matter for long. Without overshoot cosines are around 0 or above, and f is 1, but not if ranks
have different data: they contradict each other, one after another, and f only slows training down.
As f falls, so does the overshoot, and where that ends f is 1 again. AdamW's weight decay keeps its
strength. Hypergradient descent (Baydin et al. 2018) adapts learning rates by the same cosine, in
both directions.

Each rank sends its c' as a measure in its payload (`horovod_topk.core.measures`), and f is that of
the means which arrive in the step itself: equal on all ranks, whatever a rank has loaded or missed.
The exchanged gradients of the last step are kept as a state of the method, so that a restarted run
goes on with the same f. Of a large tensor only a sample is kept: evenly spaced blocks, with at most
131,072 elements and at least a third of that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

from horovod_topk.core.plan import BucketPlan
from horovod_topk.core.residual import Arenas
from horovod_topk.core.shards import shard_numel
from horovod_topk.methods.protocol import Piece
from horovod_topk.ops import Ops

Array = TypeVar("Array")

EXCHANGED = "exchanged"  # name of the state with the exchanged gradients of the last step
SAMPLE = 1 << 17  # elements that are kept of a tensor, at most
STEPS, MARGIN, GAIN = 20, 0.01, 50.0
MOST = 0.2  # a larger cosine counts as this
NOTED = 0.9  # a factor below this is logged once


class LearningRateFactor:
    """The factor f of one optimizer.

    Attributes:
        seen: number of this rank's cosines so far.
        mean: their running mean, c'.
        value: the factor f of the last exchange; equal on all ranks.
    """

    def __init__(self) -> None:
        self.seen, self.mean, self.value = 0, 0.0, 1.0

    def agree(self, means: Sequence[float]) -> None:
        """Set `value` from the running means of all ranks; if there are none, to 1."""
        mean = math.fsum(means) / max(1, len(means))
        self.value = 1.0 / (1.0 + GAIN * max(0.0, -mean - MARGIN))

    def observe(self, before: float, now: float, both: float) -> None:
        """Update the running mean by the angle between the exchanged gradients of two steps.

        Args:
            before, now: sums of squares of their elements. If one is 0, there is no angle.
            both: sum of squares of the two gradients added up.
        """
        if not (0.0 < before < math.inf and 0.0 < now < math.inf and both < math.inf):
            return
        cosine = (both - before - now) / 2 / math.sqrt(before) / math.sqrt(now)
        self.seen += 1
        self.mean += (max(-MOST, min(MOST, cosine)) - self.mean) / min(self.seen, STEPS)

    def saved(self) -> list[float]:
        """Numbers for a state dict: `seen` and `mean`; empty if nothing was seen."""
        return [float(self.seen), self.mean] if self.seen else []

    def load(self, saved: Sequence[float]) -> None:
        """Go on from what `saved` returned."""
        seen, self.mean = saved or (0.0, 0.0)
        self.seen = int(seen)


def kept_elements(piece: Piece, min_numel: int) -> int:
    """Number of a tensor's exchanged elements that are kept; none of a tensor that is small."""
    numel = piece.numel if piece.numel >= min_numel else 0
    return shard_numel(numel, _parts(numel), 0)


def compare(
    bucket: BucketPlan, kept: Arenas[Array], exchanged: Sequence[Array], ops: Ops[Array]
) -> Array:
    """Store a bucket's exchanged gradients, and compare them with those of the step before.

    Samples are scaled so that their squares have the sum that is expected of the whole tensor.

    Returns:
        [3] float32: the arguments of `LearningRateFactor.observe`. No device is waited for.
    """
    for piece, sample, gradient in zip(bucket.tensors, kept.plan.tensors, exchanged, strict=True):
        if sample.numel:
            own = ops.shard(gradient, _parts(piece.numel), 0)
            out = ops.view(kept.candidate, sample.start, sample.stop)
            ops.write_scaled(own, math.sqrt(piece.numel / sample.numel), out, False)
    before: Any = kept.residual
    now: Any = kept.candidate
    return ops.joined([ops.square(each) for each in (before, now, before + now)])


def _parts(numel: int) -> int:
    """Number of shards that a tensor is split into; the first one is kept. It is odd.

    With an even number, all kept blocks could be of the same columns of a matrix.
    """
    return max(1, -(-numel // SAMPLE)) | 1
