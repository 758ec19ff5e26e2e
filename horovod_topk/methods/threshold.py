"""Threshold: Top-K at one of five ratio levels, by the number of elements above a threshold.

The elements of e + g to send are those with a magnitude above `threshold` times the tensor's root
mean square, or above `threshold` itself. Their number depends on the data, but a payload's size
must not: so each step has one of five ratio levels, and of each tensor of n elements the
k = ceil(level * n) largest are sent. If fewer than k are above the threshold, the next largest
elements are sent too; if more are, the rest stays in the residual.

Each rank counts the elements above the threshold, and sends the count with its payloads
(`core.codec.measures`). From these counts all ranks select the same level for the next step:
the smallest one that is enough for the rank with the most elements above the threshold.

A payload's body is that of `horovod_topk.methods.topk`, at the level's ratio.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Self

from horovod_topk.config import AUTO, check_flag, checked_positive
from horovod_topk.methods.protocol import Bucket, Codec, Context, Piece, Read, Sent
from horovod_topk.methods.topk import TopK
from horovod_topk.ops import Fused, Ops
from horovod_topk.ratios import checked_ratio
from horovod_topk.schedules import Decision, Schedule

Array = Any  # an array of the framework that `ops` is for

ABOVE, COUNTED = "above", "counted"  # measures: elements above the threshold, and all elements
HALVINGS = 4  # levels below `max_ratio`, each half of the one before
OF_STEPS = {"schedule", "warmup", "guard"}  # settings that select levels; Top-K gets the level


@dataclass(frozen=True, kw_only=True)
class Filled(Schedule):
    """A schedule that selects the smallest level for all elements above the threshold."""

    def ratios(self, usual: float) -> tuple[float, ...]:
        return tuple(usual / 2**i for i in range(1, HALVINGS + 1))

    def decide(
        self, before: Decision, level: float, usual: float, measures: Mapping[str, Sequence[float]]
    ) -> Decision:
        pairs = list(zip(measures[ABOVE], measures[COUNTED], strict=True))
        if not all(counted for _, counted in pairs):  # there is nothing to compress
            return before or (usual,)
        share = max(above / counted for above, counted in pairs)
        return (min((r for r in self.ratios(usual) if r >= share), default=usual),)


@dataclass(frozen=True, kw_only=True)
class Threshold(Codec):
    """Top-K gradient compression whose k follows a threshold, with error feedback.

    In each step a rank sends about as many elements as are above the threshold: more or fewer as
    the distribution of elements changes during training. It is `TopKEF` at a ratio from
    `max_ratio` / 16 to `max_ratio`, the same for all tensors and ranks, which follows from the
    counts of the step before. The first step has `max_ratio`. Counting uses the framework's
    operations, and takes longer than encoding.

    Args:
        threshold: the threshold of magnitudes, a number above 0: a multiple of the tensor's root
            mean square, or the magnitude itself.
        relative: whether `threshold` is a multiple. The scale of gradients then has no effect, and
            at most a share 1 / threshold^2 of a tensor is above the threshold.
        max_ratio: largest share of each tensor's elements that is sent in a step, in (0, 1].
        values: format in which values are sent, or a pair with that of indices, as in `TopKEF`.

    Source: Strom 2015 (Scalable Distributed DNN Training Using Commodity GPU Cloud Computing);
    Sahu et al. 2021 (Rethinking Gradient Sparsification as Total Error Minimization).
    """

    id: ClassVar[int] = 10
    may_send_nothing: ClassVar[bool] = True
    measured: ClassVar[tuple[str, ...]] = (ABOVE, COUNTED)

    threshold: float = 3.0  # of magnitudes: times the tensor's root mean square if `relative`
    relative: bool = True  # whether `threshold` is a multiple of the tensor's root mean square
    max_ratio: float = 0.05  # largest share of each tensor's elements sent a step, in (0, 1]
    values: str = AUTO  # format of values; the rounding error stays in the residual
    indices: str = "auto"  # format of indices; "auto": packed

    def __post_init__(self) -> None:
        cure = (
            "Pass a multiple of the root mean square, such as threshold=3.0, or a magnitude with "
            "relative=False"
        )
        value = checked_positive("threshold", self.threshold, cure)
        object.__setattr__(self, "threshold", value)
        check_flag("relative", self.relative)
        object.__setattr__(self, "max_ratio", checked_ratio(self.max_ratio, "max_ratio"))
        if self.schedule is None:
            object.__setattr__(self, "schedule", Filled())
        super().__post_init__()
        object.__setattr__(self, "values", self._top.values)

    @cached_property
    def _top(self) -> TopK:
        """The `TopK` method at this ratio level."""
        shared = self.common(without=OF_STEPS)
        return TopK(self.max_ratio, values=self.values, indices=self.indices, **shared)

    @property
    def has_levels(self) -> bool:
        return True

    @property
    def ratio(self) -> float:
        """`Method.ratio`: the ratio level, at most `max_ratio` of the user's settings."""
        return self.max_ratio

    def at(self, ratio: float) -> Self:
        if ratio == self.ratio:
            return self
        top = self._top.at(ratio)
        return replace(self, max_ratio=ratio, values=top.values, ratios=top.ratios)

    def withheld(self) -> str:
        return self._top.withheld()

    def piece(self, part: Piece, direction: str) -> Piece:
        """`Method.piece`: as Top-K."""
        return self._top.piece(part, direction)

    def lay_out(self, pieces: Sequence[Any], at: int) -> tuple[list[Piece], int]:
        """`Method.lay_out`: as Top-K."""
        return self._top.lay_out(pieces, at)

    def why_whole(self, piece: Piece) -> str | None:
        """`Method.why_whole`: as Top-K."""
        return self._top.why_whole(piece)

    def encode(
        self, ops: Ops[Array], bucket: Bucket, piece: Any, values: Array, context: Context[Array]
    ) -> Sent[Array]:
        """`Codec.encode`: as Top-K. Mean squares decide which elements are sent, not how many."""
        return self._top.encode(ops, bucket, piece, values, context)

    def measure(
        self, ops: Ops[Array], bucket: Bucket, piece: Any, values: Array
    ) -> Sequence[Array]:
        """`Codec.measure`: counts of tensors that are not sent whole."""
        if piece.spec.numel < self.min_numel:
            return ()
        above = ops.count_above(values, self._limit(ops, piece.numel, values))
        return above, ops.zeros(1, "float32", bucket.device) + piece.numel

    def decode(
        self, ops: Ops[Array], bucket: Bucket, piece: Any, gathered: Array, context: Context[Array]
    ) -> Read[Array]:
        """`Codec.decode`: as Top-K."""
        return self._top.decode(ops, bucket, piece, gathered, context)

    def kernel(self, ops: Ops[Array], bucket: Bucket) -> Fused[Array] | None:
        """`Codec.kernel`: that of Top-K."""
        return self._top.kernel(ops, bucket)

    def _limit(self, ops: Ops[Array], count: int, values: Array) -> Array:
        """Return the threshold of a tensor's magnitudes: [1], of their dtype."""
        limit = ops.zeros(1, "float64", ops.device(values)) + self.threshold
        if self.relative:
            mean_square = ops.cast(ops.square(values), "float64") * (1 / count)
            limit = ops.root(mean_square) * self.threshold
        return ops.cast(limit, ops.dtype(values))
