# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator, no-any-return"
# ruff: noqa: N803
"""Formats of methods that send all elements: encode blocks of them, and load elements.

`horovod_topk.methods` defines the formats: `bytegrad`, `onebit`, `qsgd` and `terngrad`. A tensor's
data begins with the scales of all blocks, and codes of BITS bits follow without gaps. A tensor
without blocks is sent as float32. Scales may begin at any byte.

One program encodes ROWS consecutive blocks, whose codes fill whole bytes. It measures the blocks
and writes their scales, and then writes codes and residuals by the scales that it reads again.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr, tensor

from horovod_topk.kernels.triton.baselines.draws import halves
from horovod_topk.kernels.triton.topk import tables
from horovod_topk.kernels.triton.topk.formats import (
    BFLOAT16_MAX,
    LIMIT,
    above_bits,
    bfloat16_bits,
    code_at,
    finite,
    put_codes,
    put_scales,
    saturated,
    scale_at,
)
from horovod_topk.kernels.triton.topk.numbers import field, number
from horovod_topk.ops import coding

MINMAX, MEANS = tl.constexpr(tables.MINMAX), tl.constexpr(tables.MEANS)
DITHERED, L2 = tl.constexpr(tables.DITHERED), tl.constexpr(tables.DITHERED_L2)
TERNARY = tl.constexpr(tables.TERNARY)
DIGITS = tl.constexpr(5)  # ternary digits in a byte
MARGIN = tl.constexpr(coding.STEP_MARGIN)


@triton.constexpr_function
def scale_bytes(kind: int) -> int:
    """Bytes of a block's scales."""
    return {tables.MINMAX: 8, tables.MEANS: 4, tables.TERNARY: 4}.get(kind, 2)


@triton.jit
def blocks_of(own: tl.tuple) -> tensor:
    """Return the number of a tensor's blocks. own: its elements, at least one, and a block's."""
    numel, block = own
    return (numel - 1) // block + 1


@triton.jit
def float_at(section: tensor, at: tensor, mask: tensor) -> tensor:
    """Load float32 numbers `at`, which may begin at any byte; 0 where not `mask`."""
    first = section + at.to(tl.int64) * 4
    bits = tl.load(first, mask=mask, other=0).to(tl.int32)
    for part in tl.static_range(1, 4):
        bits |= tl.load(first + part, mask=mask, other=0).to(tl.int32) << (8 * part)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def put_floats(section: tensor, at: tensor, values: tensor, mask: tensor) -> None:
    """Write float32 numbers `at`, which may begin at any byte."""
    first, bits = section + at.to(tl.int64) * 4, values.to(tl.int32, bitcast=True)
    for part in tl.static_range(4):
        tl.store(first + part, ((bits >> (8 * part)) & 0xFF).to(tl.uint8), mask=mask)


@triton.jit
def digit_at(body: tensor, at: tensor, mask: tensor) -> tensor:
    """Load ternary digits `at`; the last one of a byte may be 3."""
    byte, place = tl.load(body + at // DIGITS, mask=mask, other=0).to(tl.int32), at % DIGITS
    for position in tl.static_range(1, DIGITS):
        byte = tl.where(place >= position, byte // 3, byte)
    return tl.where(place == DIGITS - 1, byte, byte % 3)


@triton.jit
def decoded(
    section: tensor, own: tl.tuple, at: tensor, code: tensor, mask: tensor,
    KIND: constexpr, BITS: constexpr,
) -> tensor:  # fmt: skip
    """Return the float32 numbers that codes of elements `at` stand for. own: (elements, block)."""
    blocks, row = blocks_of(own), at // own[1]
    if KIND == MINMAX:
        low, step = float_at(section, row, mask), float_at(section + blocks * 4, row, mask)
        value = (low + step * code.to(tl.float32)) * 2.0
    elif KIND == MEANS:
        above, below = scale_at(section, row, mask), scale_at(section + blocks * 2, row, mask)
        value = tl.where(code > 0, 0.0 - below, above)
    elif KIND == TERNARY:
        value = float_at(section, row, mask) * (code - 1).to(tl.float32)
    else:
        value = scale_at(section, row, mask) * (code - ((1 << (BITS - 1)) - 1)).to(tl.float32)
    return value


@triton.jit
def coded_at(
    section: tensor, own: tl.tuple, at: tensor, mask: tensor, KIND: constexpr, BITS: constexpr
) -> tensor:
    """Load elements `at` of a tensor as float32. own: its elements, and those of a block or 0."""
    if own[1] == 0:
        value = float_at(section, at, mask)
    else:
        body = section + blocks_of(own) * scale_bytes(KIND)
        if KIND == TERNARY:
            code = digit_at(body, at, mask)
        else:
            code = code_at(body, at, mask, BITS)
        value = decoded(section, own, at, code, mask, KIND, BITS)
    return value


@triton.jit
def ordered(values: tensor) -> tensor:
    """Return the bits of float32 as integers of the same order; or such integers as bits."""
    return values ^ ((values >> 31) & 0x7FFFFFFF)


@triton.jit
def some_of(
    elements: tensor, row: tensor, own: tl.tuple, at: tensor, WIDTH: constexpr
) -> tuple[tensor, tensor]:
    """Load elements [at, at + WIDTH) of each block `row` as finite numbers: [ROWS, WIDTH].

    Also return where there are some.
    """
    numel, block = own
    lane = at + tl.arange(0, WIDTH)[None, :]
    entry = row[:, None] * block + lane
    there = (lane < block) & (entry < numel)
    return finite(tl.load(elements + entry, mask=there, other=0.0)), there


@triton.jit
def folded(values: tensor, ROWS: constexpr, WIDTH: constexpr) -> tensor:
    """Add the second half of each row to the first, until one number is left: [ROWS]."""
    if WIDTH == 1:
        total = tl.reshape(values, [ROWS])
    else:
        halves_ = tl.sum(tl.reshape(values, [ROWS, 2, WIDTH // 2]), 1)
        total = folded(halves_, ROWS, WIDTH // 2)
    return total


@triton.jit
def paired(values: tensor, ROWS: constexpr, WIDTH: constexpr) -> tensor:
    """Add neighbours in each row, until one number is left: [ROWS]."""
    if WIDTH == 1:
        total = tl.reshape(values, [ROWS])
    else:
        pairs = tl.sum(tl.reshape(values, [ROWS, WIDTH // 2, 2]), 2)
        total = paired(pairs, ROWS, WIDTH // 2)
    return total


@triton.jit
def with_tile(
    sums: tensor, values: tensor, tile: tensor,
    ROWS: constexpr, WIDTH: constexpr, TILES: constexpr,
) -> tensor:  # fmt: skip
    """Put the sums of a tile, which has float64, in their column of [ROWS, TILES]."""
    one = folded(values, ROWS, WIDTH)[:, None]
    return tl.where((tl.arange(0, TILES) == tile)[None, :], one, sums)


@triton.jit
def put_ranges(
    section: tensor, elements: tensor, row: tensor, own: tl.tuple, ROWS: constexpr, WIDTH: constexpr
) -> None:
    """Write ByteGrad's halved lows and steps of blocks."""
    blocks, block = blocks_of(own), own[1]
    low, high = tl.full([ROWS], 0x7FFFFFFF, tl.int32), tl.full([ROWS], -0x80000000, tl.int32)
    for at in range(0, block, WIDTH):
        values, there = some_of(elements, row, own, at, WIDTH)
        order = ordered((values * 0.5).to(tl.int32, bitcast=True))
        low = tl.minimum(low, tl.min(tl.where(there, order, 0x7FFFFFFF), 1))
        high = tl.maximum(high, tl.max(tl.where(there, order, -0x80000000), 1))
    least = ordered(low).to(tl.float32, bitcast=True)
    step = (ordered(high).to(tl.float32, bitcast=True) - least) * (MARGIN / 255)
    put_floats(section, row, least, row < blocks)
    put_floats(section + blocks * 4, row, step, row < blocks)


@triton.jit
def put_means(
    section: tensor, elements: tensor, row: tensor, own: tl.tuple,
    ROWS: constexpr, WIDTH: constexpr, TILES: constexpr,
) -> None:  # fmt: skip
    """Write OneBit's means of both signs of blocks, as bfloat16."""
    blocks, numel, block = blocks_of(own), own[0], own[1]
    above, below = tl.zeros([ROWS, TILES], tl.float64), tl.zeros([ROWS, TILES], tl.float64)
    minus = tl.zeros([ROWS], tl.int32)
    for at in range(0, block, WIDTH):
        values, _ = some_of(elements, row, own, at, WIDTH)
        sizes, negative = tl.abs(values).to(tl.float64), values < 0
        above = with_tile(above, tl.where(negative, 0.0, sizes), at // WIDTH, ROWS, WIDTH, TILES)
        below = with_tile(below, tl.where(negative, sizes, 0.0), at // WIDTH, ROWS, WIDTH, TILES)
        minus += tl.sum(negative.to(tl.int32), 1)
    plus = tl.maximum(tl.minimum(numel - row * block, block), 0) - minus
    put_mean(section, row, paired(above, ROWS, TILES), plus, row < blocks)
    put_mean(section + blocks * 2, row, paired(below, ROWS, TILES), minus, row < blocks)


@triton.jit
def put_mean(section: tensor, row: tensor, total: tensor, count: tensor, mask: tensor) -> None:
    """Write means as bfloat16; 0 for no elements."""
    mean = (total / tl.maximum(count, 1).to(tl.float64)).to(tl.float32)
    put_scales(section, row, bfloat16_bits(saturated(mean, BFLOAT16_MAX)), mask)


@triton.jit
def put_steps(
    section: tensor, elements: tensor, row: tensor, own: tl.tuple,
    KIND: constexpr, BITS: constexpr, ROWS: constexpr, WIDTH: constexpr, TILES: constexpr,
) -> None:  # fmt: skip
    """Write QSGD's steps of blocks, as bfloat16."""
    block = own[1]
    largest, sums = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, TILES], tl.float64)
    for at in range(0, block, WIDTH):
        values, _ = some_of(elements, row, own, at, WIDTH)
        if KIND == L2:
            wide = values.to(tl.float64)
            sums = with_tile(sums, wide * wide, at // WIDTH, ROWS, WIDTH, TILES)
        else:
            largest = tl.maximum(largest, tl.max(tl.abs(values), 1))
    if KIND == L2:
        largest = tl.minimum(tl.sqrt(paired(sums, ROWS, TILES)), LIMIT).to(tl.float32)
    factor: constexpr = MARGIN / ((1 << (BITS - 1)) - 1)
    put_scales(section, row, above_bits(largest * factor), row < blocks_of(own))


@triton.jit
def quotient(values: tensor, by: tensor) -> tensor:
    """Divide, rounded to nearest; 0 where the divisor is 0."""
    return tl.where(by != 0, tl.math.div_rn(values, tl.where(by != 0, by, 1.0)), 0.0)


@triton.jit
def code_of(
    section: tensor, own: tl.tuple, at: tensor, values: tensor, stream: tensor, mask: tensor,
    KIND: constexpr, BITS: constexpr,
) -> tensor:  # fmt: skip
    """Return the codes of elements `at`, by the scales in the payload; 0 where not `mask`."""
    row = at // own[1]
    if KIND == MINMAX:
        steps = section + blocks_of(own) * 4
        low, step = float_at(section, row, mask), float_at(steps, row, mask)
        code = (quotient(values * 0.5 - low, step) + 0.5).to(tl.int32)
    elif KIND == MEANS:
        code = (values < 0).to(tl.int32)
    else:
        exact = quotient(tl.abs(values), scale_at(section, row, mask))
        drawn = (halves(stream, at).to(tl.float32) + 0.5) * (2.0**-16)
        level = (exact + drawn).to(tl.int32)
        code = tl.where(values < 0, -level, level) + ((1 << (BITS - 1)) - 1)
    return tl.where(mask, code, 0)


@triton.jit
def put_elements(
    section: tensor, elements: tensor, span: tl.tuple, own: tl.tuple, stream: tensor,
    KIND: constexpr, BITS: constexpr, KEEPS: constexpr, LANES: constexpr,
) -> None:  # fmt: skip
    """Write the codes of elements [first, last), and leave what they do not send."""
    first, last = span
    body = section + blocks_of(own) * scale_bytes(KIND)
    for at in range(first, last, LANES):
        entry = at + tl.arange(0, LANES)
        there = entry < last
        a = tl.load(elements + entry, mask=there, other=0.0)
        code = code_of(section, own, entry, finite(a), stream, there, KIND, BITS)
        here = body + at // 8 * BITS
        put_codes(here, last - at, tl.zeros([1], tl.int32), code[None, :], BITS, LANES, 1)
        sent = a
        if KEEPS:
            sent = decoded(section, own, entry, code, there, KIND, BITS)
        tl.store(elements + entry, a - sent, mask=there)  # NaN or infinite where `a` is


@triton.jit
def put_whole(
    section: tensor, elements: tensor, first: tensor, last: tensor, LANES: constexpr
) -> None:
    """Write elements [first, last) of a tensor that is sent as float32."""
    for at in range(first, last, LANES):
        entry = at + tl.arange(0, LANES)
        there = entry < last
        a = tl.load(elements + entry, mask=there, other=0.0)
        put_floats(section, entry, a, there)
        tl.store(elements + entry, a - a, mask=there)


@triton.jit
def pack_coded(
    table: tensor,
    owners: tensor,
    streams: tensor,
    candidate: tensor,
    payload: tensor,
    KIND: constexpr,
    BITS: constexpr,
    KEEPS: constexpr,
    ROWS: constexpr,
    SOME: constexpr,
    WIDTH: constexpr,
    TILES: constexpr,
    LANES: constexpr,
) -> None:
    """Encode one parcel, of ROWS blocks or ROWS * WIDTH elements of a tensor without blocks.

    Its elements are in the candidate arena. streams: three numbers for each tensor, as of
    `horovod_topk.ops.philox.Stream`; not used where KIND draws none.
    """
    parcel = tl.program_id(0)
    t = tl.load(owners + parcel)
    numel, block = number(table, t, "numel"), number(table, t, "block")
    place = parcel - number(table, t, "parcel0")
    section, elements = payload + field(table, t, "value_at"), candidate + number(table, t, "start")
    if block == 0:
        first = place * (ROWS * WIDTH)
        put_whole(section, elements, first, tl.minimum(first + ROWS * WIDTH, numel), LANES)
    else:
        own = numel, block
        for some in range(0, ROWS, SOME):
            row = place * ROWS + some + tl.arange(0, SOME)
            if KIND == MINMAX:
                put_ranges(section, elements, row, own, SOME, WIDTH)
            elif KIND == MEANS:
                put_means(section, elements, row, own, SOME, WIDTH, TILES)
            else:
                put_steps(section, elements, row, own, KIND, BITS, SOME, WIDTH, TILES)
        tl.debug_barrier()  # orders this program's stores before its loads
        first = place * ROWS * block
        span = first, tl.minimum(first + ROWS * block, numel)
        put_elements(section, elements, span, own, streams + t * 3, KIND, BITS, KEEPS, LANES)
