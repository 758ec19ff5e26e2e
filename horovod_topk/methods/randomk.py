"""Random-K: values at random indices that all ranks share, so that indices are not sent.

A tensor of n elements is cut into k = ceil(ratio n) stretches whose lengths differ by at most one.
In every step all ranks draw the same index from each stretch, with a shared key, and the values at
these indices are added up over ranks. Indices are unique and ascend, so no sorting is needed. Each
element is drawn with probability 1 / (length of its stretch), which is about k / n.

A rank sends 2 (P - 1) / P times 4 k bytes to and from owners, and no indices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from horovod_topk.config import check_flag
from horovod_topk.methods.protocol import Bucket, Piece, Placed, Rounds, Seeded, Work, entries
from horovod_topk.ops import Ops
from horovod_topk.ratios import checked_ratio

Array = Any  # an array of the framework that `ops` is for


@dataclass(frozen=True, kw_only=True)
class RandomK(Rounds, Seeded):
    """Send a random part of each tensor, the same on all ranks; reduced, without indices.

    It needs no selection and sends no indices, so it is cheap, and its bytes are nearly independent
    of the number of ranks. Top-K sends more of a gradient's norm with as many elements.

    With error feedback, what is not sent stays in the residual: the squared norm falls by the
    factor 1 - k / n on average, as in Top-K's worst case. Without it, values are multiplied by
    n / k. Their mean over steps is then the gradient, and the variance of an element is n / k - 1
    times its square: use a large ratio, or a small learning rate.

    Args:
        ratio: share of each tensor's elements that is sent in a step, in (0, 1].
        error_feedback: keep the rest in residuals. False: multiply sent values by n / k instead.
        seed: seed of the random numbers, a whole number from 0 on; equal on all ranks.

    Source: Stich et al. 2018 (Sparsified SGD with Memory); Wangni et al. 2018 for n / k.
    """

    id: ClassVar[int] = 3
    may_send_nothing: ClassVar[bool] = True
    rounds: ClassVar[int] = 1

    ratio: float = 0.01  # share of each tensor's elements that is sent a step, in (0, 1]
    error_feedback: bool = True  # type: ignore[misc]  # keep residuals; False: multiply sent values by n / k

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", checked_ratio(self.ratio))
        check_flag("error_feedback", self.error_feedback)
        super().__post_init__()

    def at(self, ratio: float) -> Self:
        own = tuple((name, max(each, ratio)) for name, each in self.ratios or ())
        return self if ratio == self.ratio else replace(self, ratio=ratio, ratios=own)

    def withheld(self) -> str:
        return "" if self.ratio == 1.0 else f"{self.ratio} of the elements are sent"

    def piece(self, part: Piece, direction: str) -> Piece:
        """`Method.piece`: sent whole if all elements are drawn."""
        is_small = part.spec.numel < self.min_numel
        return replace(part, whole=is_small or self.elements(part, 0) == part.numel)

    def elements(self, piece: Piece, i: int) -> int:
        """`Rounds.elements`: k."""
        return entries(piece.numel, self.ratio_of(piece.spec.name))

    def send(self, ops: Ops[Any], bucket: Bucket, piece: Piece, i: int, work: Work[Any]) -> Array:
        assert work.key is not None
        k = self.elements(piece, 0)
        index = ops.random_index(work.key.shared, piece.numel, k, bucket.device)
        work.notes["index"] = index
        values = ops.take(work.values, index)
        if self.error_feedback:
            return values
        ends = ops.arange(k + 1, bucket.device) * piece.numel // k
        lengths = ops.view(ends, 1, k + 1) - ops.view(ends, 0, k)
        return values * ops.cast(lengths, bucket.residual_dtype)

    def finish(
        self, ops: Ops[Any], bucket: Bucket, piece: Piece, work: Work[Any]
    ) -> tuple[Array | Placed[Array], Array | Placed[Array]]:
        index = work.notes["index"]
        sent = Placed(work.sent[0], index) if self.error_feedback else ops.clone(work.values)
        return Placed(work.reduced[0], index), sent
