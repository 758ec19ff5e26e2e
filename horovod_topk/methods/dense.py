"""Dense: every element of every gradient, as float32 or rounded to 16 bits.

The baseline that compression is compared with. Over the sharded exchange, its default, it is an
allreduce in a fixed order: each element's owner adds up the ranks' values in rank order, in float32
(float64 for float64 gradients), and sends the sum or mean to all ranks. Every rank gets the same
bits in every run, which Horovod's own allreduce does not guarantee.

A rank sends 2 (P - 1) / P times n elements of 4 or 2 bytes, as a ring allreduce does (Patarasuk and
Yuan 2009). Rounding errors at senders and owners stay in their residuals.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

from horovod_topk.config import EXCHANGES, check_choice
from horovod_topk.errors import ConfigError
from horovod_topk.methods.protocol import Bucket, Codec, Context, Piece, bucket_recipe
from horovod_topk.ops import Fused, Ops, coding

Array = TypeVar("Array")

VALUES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class Dense(Codec):
    """Dense exchange of gradients, in float32 or rounded to 16 bits, in a fixed order.

    It sends every element. Each element's owner adds up the ranks' values in float32, in rank
    order, so that every rank and every run gets the same bits. Over "allgather" and "hierarchical"
    it sends more bytes than over "sharded", its default. `exchange="allreduce"` is Horovod's own
    allreduce, whose order is not fixed, without residuals.

    Args:
        values: format in which elements are sent: "float32" (float64 for float64 gradients),
            "float16" or "bfloat16". The rounding error stays in residuals.

    Source: Patarasuk and Yuan 2009 (Bandwidth Optimal All-reduce Algorithms).
    """

    id: ClassVar[int] = 2
    defers: ClassVar[bool] = False  # but for rounding errors: 1/256 of an element

    values: str = "float32"  # format of elements; "float32" means float64 for float64 gradients
    exchange: str = "sharded"

    @property
    def ratio(self) -> float:
        """`Method.ratio`: always 1.0."""
        return 1.0

    @property
    def exchanges(self) -> tuple[str, ...]:
        """The exchanges of every codec, and Horovod's allreduce."""
        return (*EXCHANGES, "allreduce")

    def __post_init__(self) -> None:
        check_choice("values", self.values, VALUES)
        super().__post_init__()
        if self.exchange == "allreduce" and self.values != "float32":
            raise ConfigError(
                f"values={self.values!r} was given with exchange='allreduce', which would add up "
                "in 16 bits",
                cure="Pass exchange='sharded', whose sums are in float32, or values='float32'",
            )

    def withheld(self) -> str:
        return "" if self.values == "float32" else f"values={self.values!r} are rounded"

    def piece(self, part: Piece, direction: str) -> Piece:
        """`Codec.piece`: sent whole, unless it is rounded."""
        return replace(part, whole=self.values == "float32")

    def data_bytes(self, piece: Piece) -> int:
        return coding.value_bytes(self.values, piece.numel)

    def why_whole(self, piece: Piece) -> str | None:
        """`Codec.why_whole`: no reason, as dense gradients are what the user has chosen."""
        return None

    def pack(self, ops: Ops[Array], piece: Piece, values: Array, context: Context[Array]) -> Array:
        return ops.pack_values(values, self.values)

    def unpack(
        self, ops: Ops[Array], piece: Piece, rows: Array, dtype: str, context: Context[Array]
    ) -> Array:
        return ops.unpack_values(rows, piece.numel, self.values, dtype)

    def kernel(self, ops: Ops[Array], bucket: Bucket) -> Fused[Array] | None:
        return ops.fused(bucket_recipe(bucket, self.values), bucket.device)
