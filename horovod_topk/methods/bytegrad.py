"""ByteGrad: 8 bits for each element, between its block's smallest and largest element.

With low, a block's smallest element, and step, a 255th of its range (times 1 + 1e-6, for rounding),
an element v is sent as j = (v - low) / step, rounded, 0 to 255, and read as low + j step. All of it
is computed in float32 on v / 2, so that no range overflows. The bytes of n elements:

    float32 lows, one for each block; then float32 steps; then j of each element, 8 bits
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from horovod_topk.config import check_whole
from horovod_topk.methods.protocol import Bucket, Codec, Context, Piece, bucket_recipe
from horovod_topk.ops import Fused, Ops, coding

Array = Any  # an array of the framework that `ops` is for

STEP = coding.STEP_MARGIN / 255  # of a range
RANGE_BYTES = 4  # bytes of a low or a step


@dataclass(frozen=True, kw_only=True)
class ByteGrad(Codec):
    """Quantise each element to 8 bits between its block's minimum and maximum, with error feedback.

    4 times fewer bytes than float32, and 2 times fewer than 16 bits, whatever the number of ranks.
    The error of an element is at most 0.2% of its block's range, and the residual keeps it, so
    training hardly differs from dense. Bagua's ByteGrad has no residuals.

    Args:
        block: elements that share a range, 16 to 65536.

    Source: Gan et al. 2021 (Bagua: Scaling up Distributed Learning with System Relaxations).
    """

    id: ClassVar[int] = 8

    block: int = 2048  # elements that share a range, 16 to 65536
    exchange: str = "sharded"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("block", self.block, 16, 65536, example=2048)

    def data_bytes(self, piece: Piece) -> int:
        return 2 * self._range_bytes(piece) + piece.numel

    def pack(self, ops: Ops[Array], piece: Piece, values: Array, context: Context[Array]) -> Array:
        values = ops.finite(values) * 0.5  # halved, so that no range overflows
        low = ops.largest(values * -1, self.block) * -1
        step = (ops.largest(values, self.block) - low) * STEP
        offset = values - ops.spread(low, self.block, piece.numel)
        share = ops.divided(offset, ops.spread(step, self.block, piece.numel))
        codes = ops.pack_bits(ops.cast(share + 0.5, "int64"), 8)
        return ops.joined([*(ops.pack_values(each, "float32") for each in (low, step)), codes])

    def unpack(
        self, ops: Ops[Array], piece: Piece, rows: Array, dtype: str, context: Context[Array]
    ) -> Array:
        low, step = (
            ops.spread(each, self.block, piece.numel) for each in self._ranges(ops, piece, rows)
        )
        codes = ops.unpack_bits(
            ops.columns(rows, 2 * self._range_bytes(piece), None), piece.numel, 8
        )
        return ops.cast((low + step * ops.cast(codes, "float32")) * 2, dtype)

    def sound(self, ops: Ops[Array], piece: Piece, rows: Array, dtype: str) -> Sequence[Array]:
        """`Codec.sound`: ranges are finite, and steps are not negative."""
        low, step = self._ranges(ops, piece, rows)
        return ops.are_scales(abs(low)), ops.are_scales(step)

    def kernel(self, ops: Ops[Array], bucket: Bucket) -> Fused[Array] | None:
        recipe = bucket_recipe(bucket, "minmax", block=lambda piece: self.block)
        return ops.fused(recipe, bucket.device)

    def _ranges(self, ops: Ops[Array], piece: Piece, rows: Array) -> list[Array]:
        """Return the halved lows and steps of all blocks, [P, blocks] each."""
        size, blocks = self._range_bytes(piece), -(-piece.numel // self.block)
        parts = [ops.columns(rows, at, at + size) for at in (0, size)]
        return [ops.unpack_values(part, blocks, "float32", "float32") for part in parts]

    def _range_bytes(self, piece: Piece) -> int:
        return RANGE_BYTES * -(-piece.numel // self.block)
