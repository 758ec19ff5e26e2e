# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator, no-any-return"
# ruff: noqa: N803
"""Decode: scaled sums over payloads, a tile of a gradient at a time.

Indices ascend within a tensor, so a tile's entries are consecutive in every payload. A program
finds those of all of its tiles by binary search. Then, tile after tile, it adds them, rank after
rank, to its own row of scratch memory, and scales, casts and writes the tile.

The row, and where entries begin, are global memory that some threads of a program write and others
read. No other program accesses it, and within a program `debug_barrier` (bar.sync) orders the
accesses; entries of one rank have distinct indices, so that they are independent between two
barriers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from horovod_topk.kernels.triton.topk.formats import bfloat16_bits, halves_at, value_at, words_at
from horovod_topk.kernels.triton.topk.numbers import (
    DTYPE,
    INDEX_AT,
    NUMEL,
    TILE0,
    VALUE_AT,
    WIDTH,
    K,
    field,
    number,
)


@triton.jit
def index_at(sections: tl.tensor, at: tl.tensor, widths: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Load indices at positions `at`; each lane has its own section and index width."""
    halves = halves_at(sections, at, mask & (widths == 2))
    words = words_at(sections, at, mask & (widths == 4))
    return tl.where(widths == 2, halves, words)


@triton.jit
def first_entry(
    sections: tl.tensor,
    widths: tl.tensor,
    counts: tl.tensor,
    targets: tl.tensor,
    STEPS: tl.constexpr,
    LANES: tl.constexpr,
) -> tl.tensor:
    """Return the first of a section's entries whose index is not below a target, in each lane."""
    low, high = tl.zeros([LANES], tl.int32), counts
    for _ in range(STEPS):
        open_ = low < high
        middle = low + (high - low) // 2
        behind = index_at(sections, middle, widths, open_) < targets
        low = tl.where(open_ & behind, middle + 1, low)
        high = tl.where(open_ & (behind == 0), middle, high)
    return low


@triton.jit
def locate(
    table: tl.tensor,
    owners: tl.tensor,
    gathered: tl.tensor,
    begins: tl.tensor,
    tiles: tl.tensor,
    ranks: tl.tensor,
    payload_bytes: tl.tensor,
    STEPS: tl.constexpr,
    OUTPUT: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """begins[rank, tile] = where a tile's entries begin and end, for all tiles of a program."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    count = (tiles - program + programs - 1) // programs * ranks
    for at in range(0, count, LANES):
        lane = at + tl.arange(0, LANES)
        rank, tile, real = lane % ranks, program + lane // ranks * programs, lane < count
        t = tl.load(owners + tile, mask=real, other=0)
        width, first = number(table, t, WIDTH), (tile - number(table, t, TILE0)) * OUTPUT
        section = gathered + rank.to(tl.int64) * payload_bytes + field(table, t, INDEX_AT)
        k = number(table, t, K)
        k = tl.where(real & (width > 0), k, 0)
        begin = first_entry(section, width, k, first, STEPS, LANES)
        end = first_entry(section, width, k, first + OUTPUT, STEPS, LANES)
        last = number(table, t, NUMEL) - first <= OUTPUT  # tile of its tensor
        place = begins + (rank * tiles + tile) * 2
        tl.store(place, begin, mask=real)
        tl.store(place + 1, tl.where(last, k, end), mask=real)


@triton.jit
def poisoned(
    flags: tl.tensor,
    t: tl.tensor,
    ranks: tl.tensor,
    payload_bytes: tl.tensor,
    RANKS_ROOM: tl.constexpr,
) -> tl.tensor:
    """Whether any payload flags tensor `t`: 1 or 0."""
    rank = tl.arange(0, RANKS_ROOM)
    places = flags + rank.to(tl.int64) * payload_bytes + t // 8
    byte = tl.load(places, mask=rank < ranks, other=0).to(tl.int32)
    return tl.max((byte >> (t % 8)) & 1, 0)


@triton.jit
def add_entries(
    row: tl.tensor,
    values: tl.tensor,
    k: tl.tensor,
    indices: tl.tensor,
    width: tl.tensor,
    first: tl.tensor,
    size: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    VALUES: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """Add entries [begin, end) of one rank to the row of the `size` elements from `first`."""
    for at in range(begin, end, LANES):
        entry = at + tl.arange(0, LANES)
        there = entry < end
        if width == 2:
            place = halves_at(indices, entry, there) - first
        else:
            place = words_at(indices, entry, there) - first
        value = value_at(values, k, entry, there, VALUES)
        there &= (place >= 0) & (place < size)
        total = tl.load(row + place, mask=there, other=0.0) + value
        tl.store(row + place, total, mask=there)


@triton.jit
def add_ranks(
    gathered: tl.tensor,
    table: tl.tensor,
    t: tl.tensor,
    tile: tl.tensor,
    first: tl.tensor,
    begins: tl.tensor,
    row: tl.tensor,
    tiles: tl.tensor,
    ranks: tl.tensor,
    payload_bytes: tl.tensor,
    OUTPUT: tl.constexpr,
    VALUES: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """Add the entries of a tile to its row, rank after rank."""
    width, k = number(table, t, WIDTH), number(table, t, K)
    values = gathered + field(table, t, VALUE_AT)
    indices = gathered + field(table, t, INDEX_AT)
    wide = payload_bytes.to(tl.int64)
    size = tl.minimum(number(table, t, NUMEL) - first, OUTPUT)
    for rank in range(ranks):
        here = begins + (rank * tiles + tile) * 2
        begin, end = tl.load(here), tl.load(here + 1)
        skip = rank * wide
        add_entries(
            row, values + skip, k, indices + skip, width, first, size, begin, end, VALUES, LANES,
        )  # fmt: skip
        tl.debug_barrier()


@triton.jit
def add_dense(
    values: tl.tensor,
    lanes: tl.tensor,
    numel: tl.tensor,
    ranks: tl.tensor,
    payload_bytes: tl.tensor,
    BLOCK: tl.constexpr,
    VALUES: tl.constexpr,
) -> tl.tensor:
    """The sums over ranks of elements `lanes` of a tensor that is sent whole."""
    total = tl.zeros([BLOCK], tl.float32)
    wide = payload_bytes.to(tl.int64)
    for rank in range(ranks):
        total += value_at(values + rank * wide, numel, lanes, lanes < numel, VALUES)
    return total


@triton.jit
def take_sums(row: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """Load a block of a row, and set it to zero."""
    lanes = tl.arange(0, BLOCK)
    total = tl.load(row + lanes)
    tl.debug_barrier()
    tl.store(row + lanes, tl.zeros([BLOCK], tl.float32))
    return total


@triton.jit
def write_scaled(
    address: tl.tensor,
    dtype: tl.tensor,
    at: tl.tensor,
    values: tl.tensor,
    mask: tl.tensor,
    KIND: tl.constexpr,
) -> None:
    """Write float32 values to elements `at` of a gradient, rounded to its dtype."""
    if (KIND == 0) | ((KIND == 3) & (dtype == 0)):
        pointers = address.to(tl.pointer_type(tl.float16)) + at
        tl.store(pointers, values.to(tl.float16), mask=mask)
    elif (KIND == 1) | ((KIND == 3) & (dtype == 1)):
        pointers = address.to(tl.pointer_type(tl.int16)) + at
        tl.store(pointers, bfloat16_bits(values).to(tl.int16), mask=mask)
    else:
        tl.store(address.to(tl.pointer_type(tl.float32)) + at, values, mask=mask)


@triton.jit
def write_block(
    address: tl.tensor,
    dtype: tl.tensor,
    at: tl.tensor,
    values: tl.tensor,
    numel: tl.tensor,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the block from element `at`: by wide accesses if it is whole and aligned."""
    lanes = at + tl.arange(0, BLOCK)
    if (address % 16 == 0) & (at + BLOCK <= numel):
        lanes = tl.multiple_of(at, BLOCK) + tl.arange(0, BLOCK)
        write_scaled(tl.multiple_of(address, 16), dtype, lanes, values, None, KIND)
    else:
        write_scaled(address, dtype, lanes, values, lanes < numel, KIND)


@triton.jit
def gather_tile(
    table: tl.tensor,
    t: tl.tensor,
    tile: tl.tensor,
    address: tl.tensor,
    gathered: tl.tensor,
    begins: tl.tensor,
    row: tl.tensor,
    tiles: tl.tensor,
    ranks: tl.tensor,
    payload_bytes: tl.tensor,
    bad: tl.tensor,
    scale: tl.tensor,
    KIND: tl.constexpr,
    VALUES: tl.constexpr,
    OUTPUT: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """Decode one tile of a gradient, to NaN if `bad`. The row is zeros before and after."""
    width, numel, dtype = number(table, t, WIDTH), number(table, t, NUMEL), number(table, t, DTYPE)
    first = (tile - number(table, t, TILE0)) * OUTPUT
    values = gathered + field(table, t, VALUE_AT)
    if (width > 0) & (bad == 0):
        add_ranks(
            gathered, table, t, tile, first, begins, row, tiles, ranks, payload_bytes,
            OUTPUT, VALUES, LANES,
        )  # fmt: skip
    for at in range(0, tl.minimum(OUTPUT, numel - first), BLOCK):
        if bad == 1:
            total = tl.full([BLOCK], float("nan"), tl.float32)
        elif width == 0:
            lanes = first + at + tl.arange(0, BLOCK)
            total = add_dense(values, lanes, numel, ranks, payload_bytes, BLOCK, VALUES)
        else:
            total = take_sums(row + tl.multiple_of(at, BLOCK), BLOCK)
        write_block(address, dtype, first + at, total * scale, numel, KIND, BLOCK)
    tl.debug_barrier()


@triton.jit
def gather(
    table: tl.tensor,
    owners: tl.tensor,
    addresses: tl.tensor,
    gathered: tl.tensor,
    begins: tl.tensor,
    rows: tl.tensor,
    tiles: tl.tensor,
    ranks: tl.tensor,
    payload_bytes: tl.tensor,
    flags_at: tl.tensor,
    scale: tl.tensor,
    KIND: tl.constexpr,
    VALUES: tl.constexpr,
    RANKS_ROOM: tl.constexpr,
    STEPS: tl.constexpr,
    OUTPUT: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """Decode a bucket: one program decodes many tiles.

    begins: [ranks, tiles, 2]; rows: [programs, OUTPUT].
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    row = rows + program.to(tl.int64) * OUTPUT
    for at in range(0, OUTPUT, BLOCK):
        tl.store(row + at + tl.arange(0, BLOCK), tl.zeros([BLOCK], tl.float32))
    if STEPS > 0:
        locate(
            table, owners, gathered, begins, tiles, ranks, payload_bytes, STEPS, OUTPUT, LANES
        )  # fmt: skip
    tl.debug_barrier()
    for tile in range(program, tiles, programs):
        t = tl.load(owners + tile)
        bad = poisoned(gathered + flags_at, t, ranks, payload_bytes, RANKS_ROOM)
        gather_tile(
            table, t, tile, tl.load(addresses + t), gathered, begins, row, tiles, ranks,
            payload_bytes, bad, scale, KIND, VALUES, OUTPUT, BLOCK, LANES,
        )  # fmt: skip
