"""OneBit: one bit for each element, read as the mean of its column's elements of that sign.

A column is the slice at one index of a tensor's first dimension, which is an output of a layer in
PyTorch; columns of fewer than 32 elements are joined until they have 32. A tensor of one dimension
is one column. Elements of at least 0 are read as their mean, elements below 0 as theirs; these two
numbers minimise |x - C(x)| for one bit. The bytes of n elements:

    bfloat16 means of the elements of at least 0, one for each column
    bfloat16 magnitudes of the means of the elements below 0, one for each column
    bits, bit i % 8 of byte i / 8 set where element i is below 0
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from horovod_topk.methods.protocol import Bucket, Codec, Context, Piece, bucket_recipe
from horovod_topk.ops import Fused, Ops, coding

Array = Any  # an array of the framework that `ops` is for

SHORTEST = 32  # least elements of a column


@dataclass(frozen=True, kw_only=True)
class OneBit(Codec):
    """1-bit SGD: send one bit for each element and two means for each column, with error feedback.

    A payload is about 30 times smaller than float32 for columns of 512 or more elements, and 16
    times for columns of 32. The error of a column is its variance within both signs, so the method
    contracts. It was made for speech networks, with large batches and dense gradients in the first
    steps, as with `warmup=[(500, 1.0)]`.

    It needs exchange="allgather", since sharding would split columns among owners.

    Source: Seide et al. 2014 (1-Bit Stochastic Gradient Descent and its Application to
    Data-Parallel Distributed Training of Speech DNNs).
    """

    id: ClassVar[int] = 7

    @property
    def exchanges(self) -> tuple[str, ...]:
        """Only allgather, which does not split columns."""
        return ("allgather",)

    def data_bytes(self, piece: Piece) -> int:
        return 2 * self._mean_bytes(piece) + -(-piece.numel // 8)

    def pack(self, ops: Ops[Array], piece: Piece, values: Array, context: Context[Array]) -> Array:
        """`Codec.pack`. Magnitudes are summed in float64, in the order of `Ops.sums`."""
        values, column = ops.finite(values), _column(piece)
        size, is_below = ops.cast(abs(values), "float64"), ops.cast(values < 0, "int64")
        parts = []
        for chosen in (is_below * -1 + 1, is_below):
            total = ops.sums(size * ops.cast(chosen, "float64"), column)
            count = ops.cast(ops.sums(chosen, column), "float64")
            mean = ops.cast(ops.divided(total, count), "float32")
            parts.append(ops.pack_values(mean, "bfloat16"))
        return ops.joined([*parts, ops.pack_bits(is_below, 1)])

    def unpack(
        self, ops: Ops[Array], piece: Piece, rows: Array, dtype: str, context: Context[Array]
    ) -> Array:
        above, below = (
            ops.spread(means, _column(piece), piece.numel)
            for means in self._means(ops, piece, rows)
        )
        bits = ops.columns(rows, 2 * self._mean_bytes(piece), None)
        is_below = ops.cast(ops.unpack_bits(bits, piece.numel, 1), "float32")
        return ops.cast(above * (is_below * -1 + 1) - below * is_below, dtype)

    def sound(self, ops: Ops[Array], piece: Piece, rows: Array, dtype: str) -> Sequence[Array]:
        """`Codec.sound`: means are finite and of the right sign."""
        return [ops.are_scales(means) for means in self._means(ops, piece, rows)]

    def kernel(self, ops: Ops[Array], bucket: Bucket) -> Fused[Array] | None:
        return ops.fused(bucket_recipe(bucket, "means", block=_column), bucket.device)

    def _means(self, ops: Ops[Array], piece: Piece, rows: Array) -> list[Array]:
        """Return the means of both signs for all columns, [P, columns] float32 each."""
        size, count = self._mean_bytes(piece), -(-piece.numel // _column(piece))
        parts = [ops.columns(rows, at, at + size) for at in (0, size)]
        return [ops.unpack_values(part, count, "bfloat16", "float32") for part in parts]

    def _mean_bytes(self, piece: Piece) -> int:
        return coding.SCALE_BYTES * -(-piece.numel // _column(piece))


def _column(piece: Piece) -> int:
    """Return the number of elements in a column."""
    shape = piece.spec.shape
    if len(shape) < 2:
        return max(1, piece.numel)
    length = max(1, math.prod(shape[1:]))
    return length * -(-SHORTEST // length)
