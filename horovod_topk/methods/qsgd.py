"""QSGD: each element is rounded at random to one of a few levels of its block.

With s = 2^(bits - 1) - 1, a block's step is the least bfloat16 that is not below its norm / s. An
element v becomes j steps with |j| <= s: |j| = floor(|v| / step + (r + 1/2) / 65536), where r is a
random number of 16 bits. That is floor(|v| / step), or one more with the probability that makes the
mean |v| / step, within 2^-16. So the mean over draws is v, within 2^-16 of a step, and the error's
mean square is at most

    min(n / s^2, sqrt(n) / s) |v|^2     norm "l2" (Alistarh et al. 2017, lemma 3.1), n = block
    n / (4 s^2) max|v|^2                norm "max"

(the step is up to 0.8% larger than there, as it is a bfloat16). The bytes of n elements:

    bfloat16 steps, one for each block; then j + s of each element in `bits` bits, without gaps
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from horovod_topk.config import check_choice, check_flag, check_whole
from horovod_topk.errors import ConfigError
from horovod_topk.methods.keys import halves
from horovod_topk.methods.protocol import Bucket, Codec, Context, Piece, Seeded, bucket_recipe
from horovod_topk.ops import Fused, Ops, coding

Array = Any  # an array of the framework that `ops` is for


@dataclass(frozen=True, kw_only=True)
class QSGD(Codec, Seeded):
    """Round each element at random to 2 to 8 bits, with a scale for each block.

    Every element is sent; a payload is 4 to 15 times smaller than float32. It is unbiased without a
    residual. With error feedback its errors are unbiased but correlated over steps, which helps if
    the error of a block is smaller than the block, and diverges otherwise.

    Args:
        bits: bits of an element, 2 to 8.
        block: elements that share a scale, 16 to 65536. Larger blocks need fewer bytes for scales
            and have larger errors.
        norm: the norm that sets a block's scale: "max", its largest magnitude, or "l2", as in the
            paper, which has a larger error and rounds most elements to 0.
        error_feedback: keep the rounding error in residuals. None: if the error's mean square
            is below the block's for any block. True is refused otherwise.
        seed: seed of the random numbers, a whole number from 0 on; equal on all ranks.

    Source: Alistarh et al. 2017 (QSGD: Communication-Efficient SGD via Gradient Quantization).
    """

    id: ClassVar[int] = 4
    may_send_nothing: ClassVar[bool] = True

    bits: int = 4  # bits of an element, 2 to 8
    block: int = 128  # elements that share a scale, 16 to 65536
    norm: str = "max"  # the norm that sets a block's scale: "max" or "l2"
    error_feedback: bool | None = None  # type: ignore[assignment,misc]  # None: where it contracts

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("bits", self.bits, 2, 8, example=4)
        check_whole("block", self.block, 16, 65536, example=128)
        check_choice("norm", self.norm, ("max", "l2"))
        if self.error_feedback is None:
            object.__setattr__(self, "error_feedback", self.contracts)
        check_flag("error_feedback", self.error_feedback)
        if self.error_feedback and not self.contracts:
            raise ConfigError(
                f"error_feedback=True was given with bits={self.bits}, block={self.block} and "
                f"norm={self.norm!r}, where the error of a block can be larger than the block, and "
                "residuals would grow",
                cure="Leave error_feedback= out, or pass more bits or smaller blocks",
            )

    @property
    def levels(self) -> int:
        """The largest multiple of a step, s."""
        return (1 << (self.bits - 1)) - 1

    @property
    def contracts(self) -> bool:
        """Whether the mean squared error is below the squared norm of every block."""
        n, s = self.block, self.levels / 1.008  # steps are rounded up to bfloat16
        variance = n / (4 * s**2) if self.norm == "max" else min(n / s**2, math.sqrt(n) / s)
        return variance < 1

    def data_bytes(self, piece: Piece) -> int:
        return self._step_bytes(piece.numel) + -(-piece.numel * self.bits // 8)

    def pack(self, ops: Ops[Array], piece: Piece, values: Array, context: Context[Array]) -> Array:
        assert context.key is not None
        values, count = ops.finite(values), piece.numel
        step = ops.above(self._norms(ops, abs(values)) * (coding.STEP_MARGIN / self.levels))
        exact = ops.divided(abs(values), ops.spread(step, self.block, count))
        drawn = ops.cast(halves(ops, context.key.own, count, ops.device(values)), "float32")
        level = ops.cast(exact + (drawn + 0.5) * 2.0**-16, "int64")
        sign = ops.cast(values < 0, "int64") * -2 + 1
        codes = level * sign + self.levels
        return ops.joined([ops.pack_values(step, "bfloat16"), ops.pack_bits(codes, self.bits)])

    def unpack(
        self, ops: Ops[Array], piece: Piece, rows: Array, dtype: str, context: Context[Array]
    ) -> Array:
        step, multiple = self._read(ops, rows, piece.numel)
        return ops.cast(ops.spread(step, self.block, piece.numel) * multiple, dtype)

    def sound(self, ops: Ops[Array], piece: Piece, rows: Array, dtype: str) -> Sequence[Array]:
        """`Codec.sound`: every step is finite and not negative, and no multiple is above s."""
        step, multiple = self._read(ops, rows, piece.numel)
        return ops.are_scales(step), ops.are_scales(multiple * -1 + self.levels)

    def kernel(self, ops: Ops[Array], bucket: Bucket) -> Fused[Array] | None:
        kind = "dithered" if self.norm == "max" else "dithered_l2"
        recipe = bucket_recipe(
            bucket,
            kind,
            keeps=bool(self.error_feedback),
            bits=self.bits,
            block=lambda piece: self.block,
        )
        return ops.fused(recipe, bucket.device)

    def _norms(self, ops: Ops[Array], size: Array) -> Array:
        """Norms of all blocks, float32, with the same bits in all frameworks.

        The l2 norm is summed in float64, in the order of `Ops.sums`. It saturates at `LIMIT`.
        """
        if self.norm == "max":
            return ops.largest(size, self.block)
        exact = ops.cast(size, "float64")
        return ops.finite(ops.root(ops.sums(exact * exact, self.block)))

    def _read(self, ops: Ops[Array], rows: Array, numel: int) -> tuple[Array, Array]:
        """Return steps, [P, blocks], and their multiples, [P, numel], both float32."""
        at, blocks = self._step_bytes(numel), -(-numel // self.block)
        step = ops.unpack_values(ops.columns(rows, 0, at), blocks, "bfloat16", "float32")
        codes = ops.unpack_bits(ops.columns(rows, at, None), numel, self.bits)
        return step, ops.cast(codes, "float32") - self.levels

    def _step_bytes(self, numel: int) -> int:
        return coding.SCALE_BYTES * -(-numel // self.block)
