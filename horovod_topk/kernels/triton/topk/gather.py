# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator, no-any-return"
# ruff: noqa: N803
"""Decode: scaled sums over payloads, a tile of a gradient at a time, of one bucket or several.

A launch before this one, `index_coding.unpack`, decodes indices. They ascend within a tensor, so a
tile's entries are consecutive in every payload. A program finds those of all of its tiles by binary
search. Then, tile after tile, it adds them, rank after rank, to its own row of scratch memory, and
scales, casts and writes the tile.

The row, and where entries begin, are global memory that some threads of a program write and others
read. No other program accesses it, and within a program `debug_barrier` (bar.sync) orders the
accesses; entries of one rank have distinct indices, so that they are independent between two
barriers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr, tensor

from horovod_topk.kernels.triton.baselines.coders import MINMAX, coded_at
from horovod_topk.kernels.triton.topk.formats import bfloat16_bits, value_at
from horovod_topk.kernels.triton.topk.numbers import (
    field,
    in_gradient,
    number,
    payloads_of,
    pointer,
    split_of,
)


@triton.jit
def first_entry(indices: tensor, counts: tensor, targets: tensor, STEPS: constexpr) -> tensor:
    """Return the first entry whose index is not below a target, in each lane."""
    low, high = tl.zeros_like(counts), counts
    for _ in range(STEPS):
        open_ = low < high
        middle = low + (high - low) // 2
        behind = tl.load(indices + middle, mask=open_, other=0) < targets
        low = tl.where(open_ & behind, middle + 1, low)
        high = tl.where(open_ & (behind == 0), middle, high)
    return low


@triton.jit
def locate(
    tables: tl.tuple,
    ranks: tensor,
    found: tl.tuple,
    STEPS: constexpr,
    OUTPUT: constexpr,
    LANES: constexpr,
) -> None:
    """begins[rank, tile] = where a tile's entries begin and end, for all tiles of a program."""
    table, owners = tables
    begins, tiles, indices, entries = found
    program, programs = tl.program_id(0), tl.num_programs(0)
    count = (tiles - program + programs - 1) // programs * ranks
    for at in range(0, count, LANES):
        lane = at + tl.arange(0, LANES)
        rank, tile, real = lane % ranks, program + lane // ranks * programs, lane < count
        t = tl.load(owners + tile, mask=real, other=0)
        first = (tile - number(table, t, "tile0")) * OUTPUT
        mine = indices + rank.to(tl.int64) * entries + field(table, t, "entry0")
        k = tl.where(real & (number(table, t, "coding") > 0), number(table, t, "k"), 0)
        begin = first_entry(mine, k, first, STEPS)
        end = first_entry(mine, k, first + OUTPUT, STEPS)
        last = number(table, t, "numel") - first <= OUTPUT  # tile of its tensor
        place = begins + (rank * tiles + tile) * 2
        tl.store(place, begin, mask=real)
        tl.store(place + 1, tl.where(last, k, end), mask=real)


@triton.jit
def poisoned(
    flags: tensor, of: tensor, payloads: tl.tuple, writers: tensor, ROOM: constexpr
) -> tensor:
    """Whether any writer of any payload flags gradient number `of`: 1 or 0."""
    _, ranks, payload_bytes = payloads
    writer = tl.arange(0, ROOM)
    places = flags + writer.to(tl.int64) * (payload_bytes // writers) + of // 8
    byte = tl.load(places, mask=writer < ranks * writers, other=0).to(tl.int32)
    return tl.max((byte >> (of % 8)) & 1, 0)


@triton.jit
def add_entries(
    row: tensor,
    section: tl.tuple,
    tile: tl.tuple,
    span: tl.tuple,
    VALUES: constexpr,
    LANES: constexpr,
) -> None:
    """Add entries of one rank to the row of the `size` elements from `first`."""
    values, k, indices = section
    first, size = tile
    begin, end = span
    for at in range(begin, end, LANES):
        entry = at + tl.arange(0, LANES)
        there = entry < end
        place = tl.load(indices + entry, mask=there, other=0) - first
        value = value_at(values, k, entry, there, VALUES)
        there &= (place >= 0) & (place < size)
        total = tl.load(row + place, mask=there, other=0.0) + value
        tl.store(row + place, total, mask=there)


@triton.jit
def add_ranks(
    row: tensor,
    own: tl.tuple,
    tile: tensor,
    first: tensor,
    payloads: tl.tuple,
    found: tl.tuple,
    OUTPUT: constexpr,
    VALUES: constexpr,
    LANES: constexpr,
) -> None:
    """Add the entries of a tile to its row, rank after rank."""
    table, t = own
    gathered, ranks, payload_bytes = payloads
    begins, tiles, indices, entries = found
    k, mine = number(table, t, "k"), indices + field(table, t, "entry0")
    values = gathered + field(table, t, "value_at")
    wide = payload_bytes.to(tl.int64)
    size = tl.minimum(number(table, t, "numel") - first, OUTPUT)
    for rank in range(ranks):
        here = begins + (rank * tiles + tile) * 2
        span = tl.load(here), tl.load(here + 1)
        section = values + rank * wide, k, mine
        add_entries(row, section, (first, size), span, VALUES, LANES)
        mine += entries
        tl.debug_barrier()


@triton.jit
def add_dense(
    values: tensor,
    lanes: tensor,
    own: tl.tuple,
    payloads: tl.tuple,
    BLOCK: constexpr,
    VALUES: constexpr,
    BITS: constexpr,
) -> tensor:
    """The sums over ranks of elements `lanes` of a tensor of which all elements are sent.

    own: its elements, and those of a block, if its kind of values has such.
    """
    _, ranks, payload_bytes = payloads
    total = tl.zeros([BLOCK], tl.float32)
    wide, numel = payload_bytes.to(tl.int64), own[0]
    for rank in range(ranks):
        if VALUES >= MINMAX:
            total += coded_at(values + rank * wide, own, lanes, lanes < numel, VALUES, BITS)
        else:
            total += value_at(values + rank * wide, numel, lanes, lanes < numel, VALUES)
    return total


@triton.jit
def take_sums(row: tensor, BLOCK: constexpr) -> tensor:
    """Load a block of a row, and set it to zero."""
    lanes = tl.arange(0, BLOCK)
    total = tl.load(row + lanes)
    tl.debug_barrier()
    tl.store(row + lanes, tl.zeros([BLOCK], tl.float32))
    return total


@triton.jit
def write_scaled(
    target: tl.tuple, at: tensor, values: tensor, mask: tensor, KIND: constexpr
) -> None:
    """Write float32 values to elements `at` of a gradient, rounded to its dtype.

    Without a mask its address is a multiple of 16.
    """
    address, dtype = target
    if (KIND == 0) | ((KIND == 3) & (dtype == 0)):
        pointers = pointer(address, tl.float16, mask is None) + at
        tl.store(pointers, values.to(tl.float16), mask=mask)
    elif (KIND == 1) | ((KIND == 3) & (dtype == 1)):
        pointers = pointer(address, tl.int16, mask is None) + at
        tl.store(pointers, bfloat16_bits(values).to(tl.int16), mask=mask)
    else:
        tl.store(pointer(address, tl.float32, mask is None) + at, values, mask=mask)


@triton.jit
def write_block(
    target: tl.tuple, at: tensor, values: tensor, numel: tensor, KIND: constexpr, BLOCK: constexpr
) -> None:
    """Write the block from element `at`: by wide accesses if it is whole and aligned."""
    address, dtype, split = target
    if (address % 16 == 0) & (at + BLOCK <= numel):
        places = in_gradient(tl.multiple_of(at, BLOCK) + tl.arange(0, BLOCK), split)
        write_scaled((address, dtype), places, values, None, KIND)
    else:
        lanes = at + tl.arange(0, BLOCK)
        write_scaled((address, dtype), in_gradient(lanes, split), values, lanes < numel, KIND)


@triton.jit
def gather_tile(
    own: tl.tuple,
    tile: tensor,
    address: tensor,
    row: tensor,
    payloads: tl.tuple,
    found: tl.tuple,
    bad: tensor,
    scale: tensor,
    KIND: constexpr,
    VALUES: constexpr,
    BITS: constexpr,
    OUTPUT: constexpr,
    BLOCK: constexpr,
    LANES: constexpr,
) -> None:
    """Decode one tile of a gradient, to NaN if `bad`. The row is zeros before and after."""
    table, t = own
    coding, numel = number(table, t, "coding"), number(table, t, "numel")
    target = address, number(table, t, "dtype"), split_of(table, t)
    first = (tile - number(table, t, "tile0")) * OUTPUT
    values = payloads[0] + field(table, t, "value_at")
    if (coding > 0) & (bad == 0):
        add_ranks(row, own, tile, first, payloads, found, OUTPUT, VALUES, LANES)
    for at in range(0, tl.minimum(OUTPUT, numel - first), BLOCK):
        if bad == 1:
            total = tl.full([BLOCK], float("nan"), tl.float32)
        elif coding == 0:
            lanes = first + at + tl.arange(0, BLOCK)
            shape = numel, number(table, t, "block")
            total = add_dense(values, lanes, shape, payloads, BLOCK, VALUES, BITS)
        else:
            total = take_sums(row + tl.multiple_of(at, BLOCK), BLOCK)
        write_block(target, first + at, total * scale, numel, KIND, BLOCK)
    tl.debug_barrier()


@triton.jit
def gather(
    table: tensor,
    owners: tensor,
    addresses: tensor,
    indices: tensor,
    begins: tensor,
    rows: tensor,
    entries: tensor,
    tiles: tensor,
    ranks: tensor,
    writers: tensor,
    scale: tensor,
    KIND: constexpr,
    VALUES: constexpr,
    BITS: constexpr,
    ROOM: constexpr,
    STEPS: constexpr,
    OUTPUT: constexpr,
    BLOCK: constexpr,
    LANES: constexpr,
) -> None:
    """Decode buckets: one program decodes many tiles.

    addresses: of each bucket's payloads, then of gradients; the table says where.
    indices: [ranks, entries]; begins: [ranks, tiles, 2]; rows: [programs, OUTPUT].
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    found = begins, tiles, indices, entries
    row = rows + program.to(tl.int64) * OUTPUT
    for at in range(0, OUTPUT, BLOCK):
        tl.store(row + at + tl.arange(0, BLOCK), tl.zeros([BLOCK], tl.float32))
    if STEPS > 0:
        locate((table, owners), ranks, found, STEPS, OUTPUT, LANES)
    tl.debug_barrier()
    for tile in range(program, tiles, programs):
        t = tl.load(owners + tile)
        gathered = payloads_of(table, t, addresses)
        payloads = gathered, ranks, number(table, t, "payload_bytes")
        flags, of = gathered + field(table, t, "flags_at"), field(table, t, "gradient")
        bad = poisoned(flags, of, payloads, writers, ROOM)
        address = tl.load(addresses + field(table, t, "target"))
        gather_tile(
            (table, t), tile, address, row, payloads, found, bad, scale,
            KIND, VALUES, BITS, OUTPUT, BLOCK, LANES,
        )  # fmt: skip
