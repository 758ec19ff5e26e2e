# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator, no-any-return"
"""Selection by Adam's mean squares: weights as `horovod_topk.ops.protocol.Ops.weighted` has them.

A small launch before the first pass finds the least square that counts in each tensor. The first
pass then multiplies e + g by weights, and the others select by the products.
"""

from __future__ import annotations

import triton
import triton.language as tl

from horovod_topk.kernels.triton.topk.numbers import INFINITY, NUMEL, number

TOP_WEIGHT = tl.constexpr(0x3F800000 // 4 * 5)  # 5/4 of the bits of 1
MANTISSA = tl.constexpr(23)  # its bits
BELOW = tl.constexpr(7)  # binary orders of magnitude from the mean to the least square
ROWS, LEAST_ROW, TAKEN = tl.constexpr(64), tl.constexpr(16), tl.constexpr(16)
ROOM = tl.constexpr(2048)  # no sample has more elements


@triton.jit
def weigh(table: tl.tensor, squares: tl.tensor, leasts: tl.tensor) -> None:
    """Store the least square that counts in each tensor, as bits; one program for each tensor.

    squares: addresses of the squares, 0 for a tensor that has none.
    """
    t = tl.program_id(0)
    address, numel = tl.load(squares + t), number(table, t, NUMEL)
    stride = tl.maximum(numel // ROWS, LEAST_ROW) | 1
    count = tl.where(address != 0, numel // stride * TAKEN, 0)
    lanes = tl.arange(0, ROOM)
    places = address.to(tl.pointer_type(tl.float32)) + lanes // TAKEN * stride + lanes % TAKEN
    sample = tl.load(places, mask=lanes < count, other=0.0).to(tl.float64)
    mean = (tl.sum(sample, 0) / tl.maximum(count, 1).to(tl.float64)).to(tl.float32)
    bits = mean.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    least = tl.maximum((bits >> MANTISSA) - BELOW, 0) << MANTISSA
    tl.store(leasts + t, tl.where(bits != 0, least, INFINITY))


@triton.jit
def weighted(
    a: tl.tensor, squares: tl.tensor, at: tl.tensor, mask: tl.tensor, least: tl.tensor
) -> tl.tensor:
    """Multiply elements `at` of a tensor by their weights; `squares` is an address, or 0."""
    if squares != 0:
        pointers = squares.to(tl.pointer_type(tl.int32)) + at
        if mask is None:
            bits = tl.load(pointers)
        else:
            bits = tl.load(pointers, mask=mask, other=0)
        bits = tl.maximum(bits & 0x7FFFFFFF, least)
        weights = -(bits >> 2) + TOP_WEIGHT
        a = weights.to(tl.float32, bitcast=True) * a
    return a
