"""SignSGD: the sign of each element, times the mean magnitude of its block, or a majority vote.

A tensor of n elements takes ceil(n / 8) bytes for signs, bit i % 8 of byte i / 8 set where element
i is below 0. With error feedback a bfloat16 scale for each block of 1,024 elements comes before the
signs: the block's mean magnitude, rounded. Receivers read C(x) for x, and

    |x - C(x)|^2 <= (1 - |x|_1^2 / (n |x|_2^2)) |x|^2, for a block of n

apart from the scale's rounding (Karimireddy et al. 2019, lemma 8). With a majority vote each rank
applies the sign of the sum of all ranks' signs, and keeps no residual (Bernstein et al. 2018).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from horovod_topk.config import EXCHANGES, check_flag
from horovod_topk.errors import ConfigError
from horovod_topk.methods.protocol import Bucket, Codec, Context, Piece, bucket_recipe
from horovod_topk.ops import Fused, Ops, coding

Array = Any  # an array of the framework that `ops` is for


@dataclass(frozen=True, kw_only=True)
class SignSGD(Codec):
    """Send one bit for each element: EF-SignSGD, or a majority vote on signs.

    With error feedback a block's scale is its mean magnitude, and the residual keeps the rest: 31
    times fewer bytes than float32. All elements of a block are sent with the same magnitude, so the
    residual is large, and training diverges at learning rates near the limit of dense training.

    A vote applies +1, -1 or, in a tie, 0 to each element: it needs another learning rate, about
    that of Adam. Small tensors are averaged without a vote; pass `min_numel=0` to vote on all
    tensors. An element that is 0 counts as a vote for +1.

    Args:
        majority: apply the majority's sign, without error feedback. Needs exchange="allgather".

    Source: Karimireddy et al. 2019 (Error Feedback Fixes SignSGD); Bernstein et al. 2018 (signSGD:
    Compressed Optimisation for Non-Convex Problems) for the vote.
    """

    id: ClassVar[int] = 5

    majority: bool = False  # apply the majority's sign, without error feedback

    def __post_init__(self) -> None:
        check_flag("majority", self.majority)
        super().__post_init__()
        if self.majority and self.clip_norm is not None:
            raise ConfigError(
                f"clip_norm={self.clip_norm} with majority=True: clipping changes no sign",
                cure="Leave clip_norm= out",
            )

    @property
    def error_feedback(self) -> bool:  # type: ignore[override]
        """`Codec.error_feedback`: False with `majority`."""
        return not self.majority

    @property
    def exchanges(self) -> tuple[str, ...]:
        """All exchanges of codecs; with `majority` only allgather, as each rank counts votes."""
        return ("allgather",) if self.majority else EXCHANGES

    def data_bytes(self, piece: Piece) -> int:
        return -(-piece.numel // 8) if self.majority else coding.value_bytes("sign", piece.numel)

    def pack(self, ops: Ops[Array], piece: Piece, values: Array, context: Context[Array]) -> Array:
        if self.majority:
            return ops.pack_bits(ops.cast(values < 0, "int64"), 1)
        return ops.pack_values(values, "sign")

    def unpack(
        self, ops: Ops[Array], piece: Piece, rows: Array, dtype: str, context: Context[Array]
    ) -> Array:
        if self.majority:
            return ops.cast(ops.unpack_bits(rows, piece.numel, 1) * -2 + 1, dtype)
        return ops.unpack_values(rows, piece.numel, "sign", dtype)

    def sound(self, ops: Ops[Array], piece: Piece, rows: Array, dtype: str) -> Sequence[Array]:
        """`Codec.sound`: every scale is finite and not negative."""
        if self.majority:
            return ()
        blocks = coding.scales("sign", piece.numel)
        scales = ops.columns(rows, 0, coding.SCALE_BYTES * blocks)
        return (ops.are_scales(ops.unpack_values(scales, blocks, "bfloat16", dtype)),)

    def kernel(self, ops: Ops[Array], bucket: Bucket) -> Fused[Array] | None:
        """`Codec.kernel`: the kernel for signs; there is none for a majority vote."""
        return None if self.majority else ops.fused(bucket_recipe(bucket, "sign"), bucket.device)

    def settle(self, ops: Ops[Array], total: Array) -> Array | None:
        """`Codec.settle`: with `majority`, the sign of the sum."""
        if not self.majority:
            return None
        dtype = ops.dtype(total)
        return ops.cast(total > 0, dtype) - ops.cast(total < 0, dtype)
