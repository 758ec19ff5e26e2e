# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator, no-any-return"
# ruff: noqa: N803
"""TernGrad's moments of a tensor, and its codes: three launches for each tensor."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from horovod_topk.kernels.triton.baselines.coders import DIGITS, folded, put_floats
from horovod_topk.kernels.triton.baselines.draws import halves, numbers_of
from horovod_topk.kernels.triton.launching import FOUR_WARPS, launch, on
from horovod_topk.kernels.triton.memory import packed
from horovod_topk.kernels.triton.topk.formats import finite
from horovod_topk.ops import coding
from horovod_topk.ops.philox import Stream

SUMS = tl.constexpr(3)  # of a tile: the largest magnitude, the sum, and the sum of squares
LANES = 512  # bytes that one program encodes, or pairs that it adds at once


@triton.jit
def measure(values: tensor, sums: tensor, count: tensor, TILE: constexpr) -> None:
    """Write the `SUMS` of a tile. sums: [SUMS, tiles], float64."""
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    at = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    own = finite(tl.load(values + at, mask=at < count, other=0.0))
    wide = own.to(tl.float64)
    tl.store(sums + tile, tl.max(tl.abs(own), 0).to(tl.float64))
    tl.store(sums + tiles + tile, tl.sum(folded(wide[None, :], 1, TILE), 0))
    tl.store(sums + 2 * tiles + tile, tl.sum(folded((wide * wide)[None, :], 1, TILE), 0))


@triton.jit
def merge(sums: tensor, tiles: tensor, LANES: constexpr) -> None:
    """Add neighbouring tiles in pairs, in place, until one is left: a program for each of `SUMS`.

    Each iteration reads further on than earlier ones have written.
    """
    mine, is_sum, count = sums + tl.program_id(0) * tiles, tl.program_id(0) > 0, tiles
    while count > 1:
        for first in range(0, (count + 1) // 2, LANES):
            at = first + tl.arange(0, LANES)
            left = tl.load(mine + 2 * at, mask=2 * at < count, other=0.0)
            right = tl.load(mine + 2 * at + 1, mask=2 * at + 1 < count, other=0.0)
            tl.debug_barrier()
            both = tl.where(is_sum, left + right, tl.maximum(left, right))
            tl.store(mine + at, both, mask=2 * at < count)
            tl.debug_barrier()
        count = (count + 1) // 2


@triton.jit
def pack(
    values: tensor,
    limit: tensor,
    scale: tensor,
    stream: tensor,
    payload: tensor,
    count: tensor,
    LANES: constexpr,
) -> None:
    """Write the codes of a tensor, DIGITS in a byte, behind its scale."""
    program, most, largest = tl.program_id(0), tl.load(limit), tl.load(scale)
    byte = program.to(tl.int64) * LANES + tl.arange(0, LANES)
    total, weight = tl.zeros([LANES], tl.int32), 1
    for digit in tl.static_range(DIGITS):
        at = byte * DIGITS + digit
        there = at < count
        value = finite(tl.load(values + at, mask=there, other=0.0))
        drawn = halves(stream, at).to(tl.float32) + 0.5
        is_sent = drawn * (largest * (2.0**-16)) < tl.minimum(tl.abs(value), most)
        code = tl.where(is_sent, tl.where(value < 0, 0, 2), 1)
        total += tl.where(there, code * weight, 0)
        weight *= 3
    tl.store(payload + 4 + byte, total.to(tl.uint8), mask=byte * DIGITS < count)
    lane = tl.arange(0, 1)
    put_floats(payload, lane, largest + lane.to(tl.float32), lane + program == 0)


class TritonTernary:
    """`horovod_topk.ops.protocol.TernaryKernel` for tensors on a GPU."""

    def moments(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`TernaryKernel.moments`."""
        values, count = _float32(values), values.numel()
        tiles = max(1, -(-count // coding.TILE))
        sums = torch.empty(int(SUMS) * tiles, dtype=torch.float64, device=values.device)
        with on(values.device):
            launch(measure, (tiles,), values, sums, count, TILE=coding.TILE, **FOUR_WARPS)
            launch(merge, (int(SUMS),), sums, tiles, LANES=LANES, **FOUR_WARPS)
        largest, total, squares = sums[::tiles].view(3, 1)
        return largest.float(), total, squares

    def pack(self, values: Tensor, limit: Tensor, scale: Tensor, stream: Stream) -> Tensor:
        """`TernaryKernel.pack`."""
        values, count = _float32(values), values.numel()
        size = -(-count // int(DIGITS))
        out = torch.empty(4 + size, dtype=torch.uint8, device=values.device)
        with on(values.device):
            key = numbers_of(stream, values.device)
            programs = max(1, -(-size // LANES))
            own = values, limit, scale, key, out, count
            launch(pack, (programs,), *own, LANES=LANES, **FOUR_WARPS)
        return out


def _float32(values: Tensor) -> Tensor:
    """Return values that kernels read: float64 that float32 does not have saturate."""
    if values.dtype == torch.float64:
        whole = torch.where(values.isfinite(), values, 0.0)
        values = whole.clamp(-coding.LIMIT, coding.LIMIT).float()
    return packed(values)
