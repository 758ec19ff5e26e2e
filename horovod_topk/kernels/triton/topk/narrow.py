# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator, no-any-return"
# ruff: noqa: N803
"""Second pass of an encode: a bracket of keys around each threshold, one program for each run.

Every program of a tensor computes the same bracket [bottom, top]: from the counts of the first
pass if the threshold is near that of the step before, else from a sample of the tensor. Then each
program counts the keys of its run above, at and between the bracket's ends, and stores the keys
strictly between them. Keys at an end are only counted, so that many equal magnitudes, such as
zeros, take no memory. A bracket without the threshold costs time in the third pass, and nothing
else.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr, tensor

from horovod_topk.kernels.triton.topk.numbers import (
    ABOVE,
    BIN,
    BIN_BITS,
    BINS,
    CARRIED,
    HALF,
    INFINITY,
    INSIDE,
    NONFINITE,
    NOWHERE,
    STATS,
    magnitude,
    number,
)

TOP, BETWEEN, BOTTOM = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)  # counts after ABOVE
COUNTS = tl.constexpr(4)  # counts for each run
FEW = tl.constexpr(4096)  # elements of a small sample, which needs fewer registers
BLOCK = tl.constexpr(256)  # chunks whose histograms are added at once


@triton.jit
def ranked(keys: tensor, rank: tensor) -> tensor:
    """Return the rank-th largest key; rank 1 is the largest."""
    found = 0
    for step in range(31):
        trial = found | (1 << (30 - step))
        reached = tl.sum((keys >= trial).to(tl.int32), 0)
        found = tl.where(reached >= rank, trial, found)
    return found


@triton.jit
def from_sample(
    table: tensor, t: tensor, products: tensor, LANES: constexpr
) -> tuple[tensor, tensor]:
    """Bracket by two ranks in a sample: of the first `taken` of every `stride` elements."""
    elements, stride = products + number(table, t, "start"), number(table, t, "stride")
    taken, count = number(table, t, "taken"), number(table, t, "count")
    rank_low, rank_high = number(table, t, "rank_low"), number(table, t, "rank_high")
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
    own: tl.tuple, stats: tensor, histograms: tensor, low: tensor, crowd: tensor
) -> tuple[tensor, tensor, tensor]:
    """Return (whether one bin has the threshold, its lowest key, its highest key)."""
    table, t = own
    chunk0, chunks = number(table, t, "chunk0"), number(table, t, "chunks")
    stats, histograms, k = stats + chunk0 * STATS, histograms + chunk0 * BINS, number(table, t, "k")
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
    table: tensor,
    t: tensor,
    carried: tensor,
    products: tensor,
    stats: tensor,
    histograms: tensor,
    crowd: tensor,
    SAMPLE: constexpr,
) -> tuple[tensor, tensor, tensor]:
    """Return (whether it is part of the carried bracket, lowest key, highest key) of tensor `t`."""
    hit, bottom, top = 0, 0, 0
    if number(table, t, "rule") == CARRIED:
        low = tl.load(carried + t)
        if low < NOWHERE:
            hit, bottom, top = from_counts((table, t), stats, histograms, low, crowd)
    if hit == 0:
        if number(table, t, "count") <= FEW:
            bottom, top = from_sample(table, t, products, FEW)
        else:
            bottom, top = from_sample(table, t, products, SAMPLE)
    return hit, bottom, top


@triton.jit
def tally(
    key: tensor, ends: tl.tuple, aside: tensor, counts: tl.tuple, ROOM: constexpr
) -> tuple[tensor, tensor, tensor, tensor]:
    """Add some keys of a run (-1: none) to its four counts; store those between the ends."""
    bottom, top = ends
    above, at_top, between, at_bottom = counts
    high = (key > top).to(tl.int32) + ((key == top).to(tl.int32) << 16)
    mine = (key > bottom) & (key < top)
    rest = mine.to(tl.int32) + (((key == bottom) & (bottom < top)).to(tl.int32) << 16)
    at = between + (tl.cumsum(rest, 0) & HALF) - 1
    tl.store(aside + at, key, mask=mine & (at < ROOM))
    high, rest = tl.sum(high, 0), tl.sum(rest, 0)
    above, at_top = above + (high & HALF), at_top + (high >> 16)
    return above, at_top, between + (rest & HALF), at_bottom + (rest >> 16)


@triton.jit
def kept(
    stats: tensor, chunk0: tensor, chunks: tensor, CHUNKS_ROOM: constexpr
) -> tuple[tensor, tensor]:
    """(keys above the carried bracket in a run's chunks, most keys that one chunk stored)."""
    lanes = tl.arange(0, CHUNKS_ROOM)
    rows = stats + (chunk0 + lanes) * STATS
    above = tl.load(rows + ABOVE, mask=lanes < chunks, other=0)
    inside = tl.load(rows + INSIDE, mask=lanes < chunks, other=0)
    return tl.sum(above, 0), tl.max(inside, 0)


@triton.jit
def narrow_run(
    own: tl.tuple,
    run: tensor,
    hit: tensor,
    ends: tl.tuple,
    products: tensor,
    chunks_of: tl.tuple,
    counts: tensor,
    aside: tensor,
    CHUNK: constexpr,
    SLOT: constexpr,
    RUN_CHUNKS: constexpr,
    CHUNKS_ROOM: constexpr,
    ROOM: constexpr,
    LANES: constexpr,
) -> None:
    """The counts of one run and the keys between, from the stored keys if all were stored."""
    table, t = own
    stats, slots = chunks_of
    place = run - number(table, t, "run0")
    chunk0 = number(table, t, "chunk0") + place * RUN_CHUNKS
    chunks = tl.minimum(RUN_CHUNKS, number(table, t, "chunks") - place * RUN_CHUNKS)
    above, fullest = kept(stats, chunk0, chunks, CHUNKS_ROOM)
    at_top, between, at_bottom = 0, 0, 0
    lanes = tl.arange(0, LANES)
    if (hit == 1) & (fullest <= SLOT):
        for at in range(0, chunks * SLOT, LANES):
            chunk, room = chunk0 + (at + lanes) // SLOT, (at + lanes) % SLOT
            valid = at + lanes < chunks * SLOT
            inside = tl.load(stats + chunk * STATS + INSIDE, mask=valid, other=0)
            valid &= room < inside
            key = tl.load(slots + chunk.to(tl.int64) * SLOT + room, mask=valid, other=-1)
            above, at_top, between, at_bottom = tally(
                key, ends, aside, (above, at_top, between, at_bottom), ROOM
            )
    else:
        above = 0
        elements = products + number(table, t, "start")
        first = place * RUN_CHUNKS * CHUNK
        last = tl.minimum(first + RUN_CHUNKS * CHUNK, number(table, t, "numel"))
        for at in range(first, last, LANES):
            valid = at + lanes < last
            a = tl.load(elements + at + lanes, mask=valid, other=0.0)
            key = tl.where(valid, magnitude(a), -1)
            above, at_top, between, at_bottom = tally(
                key, ends, aside, (above, at_top, between, at_bottom), ROOM
            )
    for at in range(0, ROOM, LANES):  # fill up with zeros: the third pass reads whole rows
        empty = (at + lanes >= between) & (at + lanes < ROOM)
        tl.store(aside + at + lanes, tl.zeros([LANES], tl.int32), mask=empty)
    mine = counts + run * COUNTS
    tl.store(mine + ABOVE, above)
    tl.store(mine + TOP, at_top)
    tl.store(mine + BETWEEN, between)
    tl.store(mine + BOTTOM, at_bottom)


@triton.jit
def flag(
    table: tensor,
    owners: tensor,
    stats: tensor,
    flags: tensor,
    program: tensor,
    tensors: tensor,
    apart: tensor,
    LANES: constexpr,
) -> None:
    """Write one byte of the non-finite flags: for eight tensors, whose chunks are consecutive.

    Each payload has `tensors` tensors, and begins `apart` bytes behind the one before.
    """
    each = (tensors + 7) // 8
    payload, byte = program // each, program % each
    tensor0 = payload * tensors
    final = tensor0 + tl.minimum(byte * 8 + 7, tensors - 1)
    first = number(table, tensor0 + byte * 8, "chunk0")
    last = number(table, final, "chunk0") + number(table, final, "chunks")
    bits = tl.zeros([LANES], tl.int32)
    for at in range(first, last, LANES):
        chunk = at + tl.arange(0, LANES)
        bad = tl.load(stats + chunk * STATS + NONFINITE, mask=chunk < last, other=0)
        owner = tl.load(owners + chunk, mask=chunk < last, other=0)
        bits |= tl.where(bad != 0, 1 << ((owner - tensor0) & 7), 0)
    total = 0
    for bit in tl.static_range(8):
        total += tl.max((bits >> bit) & 1, 0) << bit
    tl.store(flags + payload.to(tl.int64) * apart + byte, tl.cast(total, tl.uint8))


@triton.jit
def narrow(
    table: tensor,
    chunk_owners: tensor,
    run_owners: tensor,
    carried: tensor,
    products: tensor,
    flags: tensor,
    stats: tensor,
    slots: tensor,
    histograms: tensor,
    brackets: tensor,
    counts: tensor,
    asides: tensor,
    runs: tensor,
    tensors: tensor,
    apart: tensor,
    crowd: tensor,
    CHUNK: constexpr,
    SLOT: constexpr,
    RUN_CHUNKS: constexpr,
    CHUNKS_ROOM: constexpr,
    ROOM: constexpr,
    LANES: constexpr,
    SAMPLE: constexpr,
) -> None:
    """The kernel of the second pass. brackets: [T, 2]; asides: [runs, ROOM]."""
    run = tl.program_id(0)
    if run < runs:
        t = tl.load(run_owners + run)
        hit, bottom, top = bracket(table, t, carried, products, stats, histograms, crowd, SAMPLE)
        if run == number(table, t, "run0"):
            tl.store(brackets + t * 2, bottom)
            tl.store(brackets + t * 2 + 1, top)
        narrow_run(
            (table, t), run, hit, (bottom, top), products, (stats, slots), counts,
            asides + run.to(tl.int64) * ROOM, CHUNK, SLOT, RUN_CHUNKS, CHUNKS_ROOM, ROOM, LANES,
        )  # fmt: skip
    else:
        flag(table, chunk_owners, stats, flags, run - runs, tensors, apart, LANES)
