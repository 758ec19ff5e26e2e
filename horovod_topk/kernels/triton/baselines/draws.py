# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator, no-any-return"
# ruff: noqa: N803
"""Random numbers from Philox4x32-10, with the bits of `horovod_topk.ops.philox`, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from horovod_topk.kernels.triton.launching import FOUR_WARPS, launch, on
from horovod_topk.kernels.triton.memory import Addresses
from horovod_topk.ops.philox import Stream

LANES = 1024  # numbers that one program draws


@triton.jit
def words(stream: tl.tensor, at: tl.tensor) -> tl.tensor:
    """Return the 32-bit words number `at` of a stream: a pointer to its three numbers."""
    key, committed = tl.load(stream), tl.load(stream + 2)
    seed = (tl.load(stream + 1) << 32) | key
    block, zero = (at // 4).to(tl.uint32), (at * 0).to(tl.uint32)
    low, high = (committed & 0xFFFFFFFF).to(tl.uint32), (committed >> 32).to(tl.uint32)
    a, b, c, d = tl.philox(seed, block, zero, zero + low, zero + high)
    return tl.where(at % 4 < 2, tl.where(at % 4 == 0, a, b), tl.where(at % 4 == 2, c, d))


@triton.jit
def halves(stream: tl.tensor, at: tl.tensor) -> tl.tensor:
    """Return the random numbers of 16 bits number `at`, int32: halves of words, the lower first."""
    return ((words(stream, at // 2) >> (at % 2 * 16).to(tl.uint32)) & 0xFFFF).to(tl.int32)


@triton.jit
def draw(
    stream: tl.tensor, out: tl.tensor, count: tl.tensor, BITS: tl.constexpr, LANES: tl.constexpr
) -> None:
    """Write the high bits of the first `count` words of a stream, int64."""
    at = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    drawn = words(stream, at) >> (32 - BITS)
    tl.store(out + at, drawn.to(tl.int64), mask=at < count)


def numbers_of(stream: Stream, device: torch.device) -> Tensor:
    """Return a stream's three numbers on a device, as kernels read them."""
    return Addresses(3, device).store([*stream.numbers()])


def random_bits(stream: Stream, count: int, bits: int, device: str) -> Tensor:
    """`horovod_topk.ops.protocol.Ops.random_bits` in one launch."""
    out = torch.empty(count, dtype=torch.int64, device=device)
    if count:
        with on(out.device):
            key, programs = numbers_of(stream, out.device), -(-count // LANES)
            launch(draw, (programs,), key, out, count, BITS=bits, LANES=LANES, **FOUR_WARPS)
    return out
