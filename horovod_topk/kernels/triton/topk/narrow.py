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

from horovod_topk.kernels.triton.topk.brackets import bracket
from horovod_topk.kernels.triton.topk.numbers import (
    ABOVE,
    CHUNK0,
    CHUNKS,
    HALF,
    INSIDE,
    NONFINITE,
    NUMEL,
    RUN0,
    START,
    STATS,
    magnitude,
    number,
)

TOP, BETWEEN, BOTTOM = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)  # counts after ABOVE
COUNTS = tl.constexpr(4)  # counts for each run


@triton.jit
def tally(
    key: tl.tensor,
    bottom: tl.tensor,
    top: tl.tensor,
    aside: tl.tensor,
    above: tl.tensor,
    at_top: tl.tensor,
    between: tl.tensor,
    at_bottom: tl.tensor,
    ROOM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Add some keys of a run (-1: none) to its four counts; store those between the ends."""
    ends = (key > top).to(tl.int32) + ((key == top).to(tl.int32) << 16)
    mine = (key > bottom) & (key < top)
    rest = mine.to(tl.int32) + (((key == bottom) & (bottom < top)).to(tl.int32) << 16)
    at = between + (tl.cumsum(rest, 0) & HALF) - 1
    tl.store(aside + at, key, mask=mine & (at < ROOM))
    ends, rest = tl.sum(ends, 0), tl.sum(rest, 0)
    return (
        above + (ends & HALF),
        at_top + (ends >> 16),
        between + (rest & HALF),
        at_bottom + (rest >> 16),
    )


@triton.jit
def kept(
    stats: tl.tensor, chunk0: tl.tensor, chunks: tl.tensor, CHUNKS_ROOM: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """(keys above the carried bracket in a run's chunks, most keys that one chunk stored)."""
    lanes = tl.arange(0, CHUNKS_ROOM)
    rows = stats + (chunk0 + lanes) * STATS
    above = tl.load(rows + ABOVE, mask=lanes < chunks, other=0)
    inside = tl.load(rows + INSIDE, mask=lanes < chunks, other=0)
    return tl.sum(above, 0), tl.max(inside, 0)


@triton.jit
def narrow_run(
    table: tl.tensor,
    run: tl.tensor,
    t: tl.tensor,
    hit: tl.tensor,
    bottom: tl.tensor,
    top: tl.tensor,
    products: tl.tensor,
    stats: tl.tensor,
    slots: tl.tensor,
    counts: tl.tensor,
    aside: tl.tensor,
    CHUNK: tl.constexpr,
    SLOT: tl.constexpr,
    RUN_CHUNKS: tl.constexpr,
    CHUNKS_ROOM: tl.constexpr,
    ROOM: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """The counts of one run and the keys between, from the stored keys if all were stored."""
    place = run - number(table, t, RUN0)
    chunk0 = number(table, t, CHUNK0) + place * RUN_CHUNKS
    chunks = tl.minimum(RUN_CHUNKS, number(table, t, CHUNKS) - place * RUN_CHUNKS)
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
                key, bottom, top, aside, above, at_top, between, at_bottom, ROOM
            )
    else:
        above = 0
        elements = products + number(table, t, START)
        first = place * RUN_CHUNKS * CHUNK
        last = tl.minimum(first + RUN_CHUNKS * CHUNK, number(table, t, NUMEL))
        for at in range(first, last, LANES):
            valid = at + lanes < last
            a = tl.load(elements + at + lanes, mask=valid, other=0.0)
            key = tl.where(valid, magnitude(a), -1)
            above, at_top, between, at_bottom = tally(
                key, bottom, top, aside, above, at_top, between, at_bottom, ROOM
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
    table: tl.tensor,
    owners: tl.tensor,
    stats: tl.tensor,
    flags: tl.tensor,
    byte: tl.tensor,
    tensors: tl.tensor,
    LANES: tl.constexpr,
) -> None:
    """Write one byte of the non-finite flags: for eight tensors, whose chunks are consecutive."""
    final = tl.minimum(byte * 8 + 7, tensors - 1)
    first = number(table, byte * 8, CHUNK0)
    last = number(table, final, CHUNK0) + number(table, final, CHUNKS)
    bits = tl.zeros([LANES], tl.int32)
    for at in range(first, last, LANES):
        chunk = at + tl.arange(0, LANES)
        bad = tl.load(stats + chunk * STATS + NONFINITE, mask=chunk < last, other=0)
        owner = tl.load(owners + chunk, mask=chunk < last, other=0)
        bits |= tl.where(bad != 0, 1 << (owner & 7), 0)
    total = 0
    for bit in tl.static_range(8):
        total += tl.max((bits >> bit) & 1, 0) << bit
    tl.store(flags + byte, tl.cast(total, tl.uint8))


@triton.jit
def narrow(
    table: tl.tensor,
    chunk_owners: tl.tensor,
    run_owners: tl.tensor,
    carried: tl.tensor,
    products: tl.tensor,
    flags: tl.tensor,
    stats: tl.tensor,
    slots: tl.tensor,
    histograms: tl.tensor,
    brackets: tl.tensor,
    counts: tl.tensor,
    asides: tl.tensor,
    runs: tl.tensor,
    tensors: tl.tensor,
    crowd: tl.tensor,
    CHUNK: tl.constexpr,
    SLOT: tl.constexpr,
    RUN_CHUNKS: tl.constexpr,
    CHUNKS_ROOM: tl.constexpr,
    ROOM: tl.constexpr,
    LANES: tl.constexpr,
    SAMPLE: tl.constexpr,
) -> None:
    """The kernel of the second pass. brackets: [T, 2]; asides: [runs, ROOM]."""
    run = tl.program_id(0)
    if run < runs:
        t = tl.load(run_owners + run)
        hit, bottom, top = bracket(
            table, t, carried, products, stats, histograms, crowd, SAMPLE
        )  # fmt: skip
        if run == number(table, t, RUN0):
            tl.store(brackets + t * 2, bottom)
            tl.store(brackets + t * 2 + 1, top)
        narrow_run(
            table, run, t, hit, bottom, top, products, stats, slots, counts,
            asides + run.to(tl.int64) * ROOM, CHUNK, SLOT, RUN_CHUNKS, CHUNKS_ROOM, ROOM, LANES,
        )  # fmt: skip
    else:
        flag(table, chunk_owners, stats, flags, run - runs, tensors, LANES)
