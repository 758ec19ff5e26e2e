"""TernGrad: each element becomes -1, 0 or 1 times a scale that all ranks share.

Elements g of a tensor are first clipped to c standard deviations of the tensor. Each rank i then
announces its largest magnitude s_i, and s is the largest of all s_i. Element g becomes s times the
sign of g with probability |g| / s, and 0 otherwise: on average g, with the variance |g| (s - |g|).
It is not 0 if (r + 1/2) s / 65536 < |g| for a random number r of 16 bits, so that the mean over
draws is g within 2^-16 s. The bytes of n elements:

    s as a float32
    1 + (element / s) for each element, in base 3: byte i has elements 5 i to 5 i + 4, with the
    weights 1, 3, 9, 27 and 81
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from horovod_topk.config import checked_positive
from horovod_topk.methods.keys import halves
from horovod_topk.methods.protocol import (
    AnnouncingCodec,
    Bucket,
    Context,
    Piece,
    Seeded,
    bucket_recipe,
)
from horovod_topk.ops import Fused, Ops, coding

Array = Any  # an array of the framework that `ops` is for

SCALE_BYTES = 4


@dataclass(frozen=True)
class Ternary(Piece):
    """A piece, and the limit to which its elements are clipped before they are rounded."""

    clip: float | None = None  # in standard deviations; None: no clipping


@dataclass(frozen=True, kw_only=True)
class TernGrad(AnnouncingCodec, Seeded):
    """Send each element as -1, 0 or 1, drawn at random, times a scale of the tensor.

    Five elements take a byte: a payload is 20 times smaller than float32. Gradients are
    unbiased but noisy, and noisier the larger a tensor's largest element is relative to the
    others. Clipping makes that noise several times smaller, and gradients a little shorter: the
    largest 1% of normally distributed elements are clipped at 2.5. There is no residual, so a run
    needs no state but the count of steps. It suits convolutional networks with a learning rate
    below the limit of dense training.

    Ranks agree on scales in an exchange of 4 bytes for each tensor, which every bucket waits for.
    Over "allgather", ranks' values with a common scale add up to multiples of it, as in the paper.
    Over "sharded", each owner's shard of a tensor has its own scale, and the owner rounds the mean
    at random once more, unclipped, which adds noise.

    Args:
        clip: standard deviations that elements are clipped to, above 0. None: no clipping; then
            the gradient is sent without bias.
        seed: seed of the random numbers, a whole number from 0 on; equal on all ranks.

    Source: Wen et al. 2017 (TernGrad: Ternary Gradients to Reduce Communication in Distributed
    Deep Learning).
    """

    id: ClassVar[int] = 9
    error_feedback: ClassVar[bool] = False

    clip: float | None = 2.5  # standard deviations that elements are clipped to; None: off

    def __post_init__(self) -> None:
        if self.clip is not None:
            cure = "Pass the standard deviations to clip elements to, such as clip=2.5, or None"
            object.__setattr__(self, "clip", checked_positive("clip", self.clip, cure))
        super().__post_init__()

    def piece(self, part: Piece, direction: str) -> Piece:
        """`Method.piece`: an owner does not clip the means that it sends back, as most are 0."""
        part = super().piece(part, direction)
        known = {each.name: getattr(part, each.name) for each in fields(Piece)}
        return Ternary(**known, clip=None if direction == "gather" else self.clip)

    def data_bytes(self, piece: Piece) -> int:
        return SCALE_BYTES + -(-piece.numel // coding.digits(3))

    def numbers(self, piece: Piece) -> int:
        """`AnnouncingCodec.numbers`: one, the largest magnitude."""
        return 1

    def announce(self, ops: Ops[Array], piece: Piece, values: Array) -> Array:
        """`AnnouncingCodec.announce`: the largest magnitude of clipped elements."""
        assert isinstance(piece, Ternary)
        kernel, count = ops.ternary(ops.device(values)), piece.numel
        moments = _moments(ops, values, count) if kernel is None else kernel.moments(values)
        largest, *sums = moments
        if piece.clip is None:
            return largest
        return _lesser(ops, largest, _deviations(ops, sums, count, piece.clip))

    def pack(self, ops: Ops[Array], piece: Piece, values: Array, context: Context[Array]) -> Array:
        announced, key = context.announced, context.key
        assert announced is not None
        assert key is not None
        scale, kernel = ops.column_largest(announced.rows), ops.ternary(ops.device(values))
        if kernel is not None:
            return kernel.pack(values, announced.own, scale, key.own)
        values, count = ops.finite(values), piece.numel
        size = _lesser(ops, abs(values), ops.spread(announced.own, count, count))
        drawn = ops.cast(halves(ops, key.own, count, ops.device(values)), "float32")
        part = ops.spread(scale * 2.0**-16, count, count)
        is_sent = ops.cast((drawn + 0.5) * part < size, "int64")
        sign = ops.cast(values < 0, "int64") * -2 + 1
        codes = ops.pack_digits(is_sent * sign + 1, 3)
        return ops.joined([ops.pack_values(scale, "float32"), codes])

    def unpack(
        self, ops: Ops[Array], piece: Piece, rows: Array, dtype: str, context: Context[Array]
    ) -> Array:
        scale, multiple = self._read(ops, rows, piece.numel)
        return ops.cast(ops.spread(scale, piece.numel, piece.numel) * multiple, dtype)

    def sound(self, ops: Ops[Array], piece: Piece, rows: Array, dtype: str) -> Sequence[Array]:
        """`Codec.sound`: the scale is finite and not negative, and no multiple is above 1."""
        scale, multiple = self._read(ops, rows, piece.numel)
        return ops.are_scales(scale), ops.are_scales(multiple * -1 + 1)

    def kernel(self, ops: Ops[Array], bucket: Bucket) -> Fused[Array] | None:
        """`Codec.kernel`: a kernel that only decodes."""
        recipe = bucket_recipe(
            bucket, "ternary", keeps=False, block=lambda piece: max(piece.numel, 1)
        )
        return ops.fused(recipe, bucket.device)

    def _read(self, ops: Ops[Array], rows: Array, numel: int) -> tuple[Array, Array]:
        """Return the scale, [P, 1], and its multiples, [P, numel], both float32."""
        scale = ops.unpack_values(ops.columns(rows, 0, SCALE_BYTES), 1, "float32", "float32")
        codes = ops.unpack_digits(ops.columns(rows, SCALE_BYTES, None), numel, 3)
        return scale, ops.cast(codes, "float32") - 1


def _moments(ops: Ops[Array], values: Array, count: int) -> Sequence[Array]:
    """Return the result of `TernaryKernel.moments`, by array operations."""
    values = ops.finite(values)
    exact = ops.cast(values, "float64")
    largest = ops.largest(abs(values), count)
    return largest, ops.sums(exact, count), ops.sums(exact * exact, count)


def _deviations(ops: Ops[Array], sums: Sequence[Array], count: int, clip: float) -> Array:
    """Return `clip` standard deviations, [1] float32, with the same bits everywhere.

    sums: sums of the elements and of their squares, float64. They are multiplied by one constant
        at a time, as graphs would merge several constants.
    """
    mean, square = (each * (1 / count) for each in sums)
    return ops.finite(ops.root(abs(square - mean * mean)) * min(clip, coding.LIMIT))


def _lesser(ops: Ops[Array], left: Array, right: Array) -> Array:
    """Return the smaller of two non-negative numbers, element by element."""
    is_left = ops.cast(left < right, "float32")
    return left * is_left + right * (is_left * -1 + 1)
