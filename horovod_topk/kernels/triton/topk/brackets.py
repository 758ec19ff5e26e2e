# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator, no-any-return"
# ruff: noqa: N803
"""Bracket the threshold of a tensor: by the counts of an encode's first pass, or by a sample."""

from __future__ import annotations

import triton
import triton.language as tl

from horovod_topk.kernels.triton.topk.numbers import (
    ABOVE,
    BIN,
    BIN_BITS,
    BINS,
    CARRIED,
    CHUNK0,
    CHUNKS,
    COUNT,
    INFINITY,
    NOWHERE,
    RANK_HIGH,
    RANK_LOW,
    RULE,
    START,
    STATS,
    STRIDE,
    TAKEN,
    K,
    magnitude,
    number,
)

FEW = tl.constexpr(4096)  # elements of a small sample, which needs fewer registers
BLOCK = tl.constexpr(256)  # chunks whose histograms are added at once


@triton.jit
def ranked(keys: tl.tensor, rank: tl.tensor) -> tl.tensor:
    """Return the rank-th largest key; rank 1 is the largest."""
    found = 0
    for step in range(31):
        trial = found | (1 << (30 - step))
        reached = tl.sum((keys >= trial).to(tl.int32), 0)
        found = tl.where(reached >= rank, trial, found)
    return found


@triton.jit
def from_sample(
    elements: tl.tensor,
    stride: tl.tensor,
    taken: tl.tensor,
    count: tl.tensor,
    rank_low: tl.tensor,
    rank_high: tl.tensor,
    LANES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Bracket by two ranks in a sample: of the first `taken` of every `stride` elements."""
    lanes = tl.arange(0, LANES)
    places = lanes // taken * stride + lanes % taken
    a = tl.load(elements + places, mask=lanes < count, other=0.0)
    keys = tl.where(lanes < count, magnitude(a), -1)
    bottom, top = 0, INFINITY
    if rank_low > 0:
        bottom = ranked(keys, rank_low)
    if rank_high == rank_low:
        top = bottom
    elif rank_high > 0:
        top = ranked(keys, rank_high)
    return bottom, top


@triton.jit
def from_counts(
    stats: tl.tensor,
    histograms: tl.tensor,
    chunks: tl.tensor,
    low: tl.tensor,
    k: tl.tensor,
    crowd: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return (whether one bin has the threshold, its lowest key, its highest key)."""
    rows, bins = tl.arange(0, BLOCK), tl.arange(0, BINS)
    counts, above = tl.zeros([BINS], tl.int32), tl.zeros([BLOCK], tl.int32)
    for at in range(0, chunks, BLOCK):
        row = at + rows
        above += tl.load(stats + row * STATS + ABOVE, mask=row < chunks, other=0)
        places = histograms + row[:, None] * BINS + bins[None, :]
        block = tl.load(places, mask=(row < chunks)[:, None] & (bins < BINS)[None, :], other=0)
        counts += tl.sum(block.to(tl.int32), 0)
    reached = tl.sum(above, 0) + tl.sum(counts, 0) - tl.cumsum(counts, 0)  # by higher bins
    here = (reached < k) & (k <= reached + counts)
    found = tl.sum(here.to(tl.int32), 0) > 0
    few = tl.sum(tl.where(here, counts, 0), 0) <= crowd
    bottom = low + (tl.sum(tl.where(here, bins, 0), 0) << BIN_BITS)
    return (found & few).to(tl.int32), bottom, bottom + BIN - 1


@triton.jit
def bracket(
    table: tl.tensor,
    t: tl.tensor,
    carried: tl.tensor,
    products: tl.tensor,
    stats: tl.tensor,
    histograms: tl.tensor,
    crowd: tl.tensor,
    SAMPLE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return (whether it is part of the carried bracket, lowest key, highest key) of tensor `t`."""
    hit, bottom, top = 0, 0, 0
    if number(table, t, RULE) == CARRIED:
        low = tl.load(carried + t)
        if low < NOWHERE:
            chunk0, chunks = number(table, t, CHUNK0), number(table, t, CHUNKS)
            hit, bottom, top = from_counts(
                stats + chunk0 * STATS, histograms + chunk0 * BINS, chunks, low,
                number(table, t, K), crowd,
            )  # fmt: skip
    if hit == 0:
        elements, stride = products + number(table, t, START), number(table, t, STRIDE)
        taken, count = number(table, t, TAKEN), number(table, t, COUNT)
        rank_low, rank_high = number(table, t, RANK_LOW), number(table, t, RANK_HIGH)
        if count <= FEW:
            bottom, top = from_sample(elements, stride, taken, count, rank_low, rank_high, FEW)
        else:
            bottom, top = from_sample(elements, stride, taken, count, rank_low, rank_high, SAMPLE)
    return hit, bottom, top
