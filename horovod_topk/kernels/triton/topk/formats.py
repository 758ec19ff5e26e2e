# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator, no-any-return"
# ruff: noqa: N803
"""Formats of values in a payload: load entries, and encode values.

`horovod_topk.ops.protocol.Ops.pack_values` defines the formats. int8 and int4 have a bfloat16
scale for each block of entries, then a multiple of it for each entry; int3, int2 and sign have 4, 2
or 1 scales, then for each entry the number of one, and a sign. A tensor's values may begin
at any byte, so that scales are loaded and stored byte by byte.
"""

from __future__ import annotations

import triton
import triton.language as tl

from horovod_topk.kernels.triton.topk import tables
from horovod_topk.kernels.triton.topk.numbers import INFINITY, magnitude
from horovod_topk.ops import coding

FLOAT32, FLOAT16 = tl.constexpr(tables.FLOAT32), tl.constexpr(tables.FLOAT16)
BFLOAT16, INT8 = tl.constexpr(tables.BFLOAT16), tl.constexpr(tables.INT8)
INT4, INT3, INT2 = tl.constexpr(tables.INT4), tl.constexpr(tables.INT3), tl.constexpr(tables.INT2)
BLOCK = tl.constexpr(coding.BLOCK["int4"])  # entries that share a scale; also for int8
SIGN_BLOCK = tl.constexpr(coding.BLOCK["sign"])  # also for int3 and int2
ROUNDS = tl.constexpr(coding.ROUNDS)
LIMIT = tl.constexpr(coding.LIMIT)
UNIT = tl.constexpr(float(coding.UNIT))
FLOAT16_MAX = tl.constexpr(65504.0)
BFLOAT16_MAX = tl.constexpr(2.0**128 - 2.0**120)
TO_WHOLE = tl.constexpr(1.5 * 2.0**23)  # adding it rounds to a whole number, ties to even


@triton.jit
def halves_at(section: tl.tensor, at: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Load the bits of the bfloat16 numbers at positions `at`, as int32."""
    pointers = section.to(tl.pointer_type(tl.int16)) + at
    return tl.load(pointers, mask=mask, other=0).to(tl.int32) & 0xFFFF


@triton.jit
def multiple_at(
    section: tl.tensor,
    k: tl.tensor,
    at: tl.tensor,
    mask: tl.tensor,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Load entries `at` of a tensor's k values, each a multiple in BITS bits of its block's scale.

    Where not `mask`, the result is 0.
    """
    body = section + (k + BLOCK - 1) // BLOCK * 2
    code = code_at(body, at, mask, BITS)
    multiple = (code ^ (1 << (BITS - 1))) - (1 << (BITS - 1))
    return multiple.to(tl.float32) * scale_at(section, at // BLOCK, mask)


@triton.jit
def magnitude_at(
    section: tl.tensor, k: tl.tensor, at: tl.tensor, mask: tl.tensor, BITS: tl.constexpr
) -> tl.tensor:
    """Load entries `at` of a tensor's k values, each in BITS bits: one of the scales, and a sign.

    Where not `mask`, the result is 0.
    """
    each: tl.constexpr = 1 << (BITS - 1)  # scales of a block
    body = section + (k + SIGN_BLOCK - 1) // SIGN_BLOCK * (2 * each)
    code = code_at(body, at, mask, BITS)
    scale = scale_at(section, at // SIGN_BLOCK * each + code % each, mask)
    return (1 - 2 * (code // each)).to(tl.float32) * scale


@triton.jit
def code_at(body: tl.tensor, at: tl.tensor, mask: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """Load the codes of entries `at`, of BITS bits each, as int32."""
    if 8 % BITS == 0:
        share: tl.constexpr = 8 // BITS  # entries in a byte
        word = tl.load(body + at // share, mask=mask, other=0).to(tl.int32)
        shift = at % share * BITS
    else:
        group = body + at // 8 * BITS
        shift = at % 8 * BITS
        low = tl.load(group + shift // 8, mask=mask, other=0).to(tl.int32)
        crosses = shift % 8 + BITS > 8
        high = tl.load(group + shift // 8 + 1, mask=mask & crosses, other=0).to(tl.int32)
        word = low | (high << 8)
        shift = shift % 8
    return (word >> shift) & ((1 << BITS) - 1)


@triton.jit
def scale_at(section: tl.tensor, at: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Load scales `at` of a tensor, as float32."""
    scales = section + at * 2
    low = tl.load(scales, mask=mask, other=0).to(tl.int32)
    high = tl.load(scales + 1, mask=mask, other=0).to(tl.int32)
    return widened_bits(low | (high << 8))


@triton.jit
def value_at(
    section: tl.tensor, k: tl.tensor, at: tl.tensor, mask: tl.tensor, VALUES: tl.constexpr
) -> tl.tensor:
    """Load entries `at` of a tensor's k values as float32; zero where not `mask`."""
    if VALUES == FLOAT32:
        pointers = section.to(tl.pointer_type(tl.float32)) + at
        value = tl.load(pointers, mask=mask, other=0.0)
    elif VALUES == FLOAT16:
        pointers = section.to(tl.pointer_type(tl.float16)) + at
        value = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    elif VALUES == BFLOAT16:
        value = widened_bits(halves_at(section, at, mask))
    elif VALUES == INT8:
        value = multiple_at(section, k, at, mask, 8, BLOCK)
    elif VALUES == INT4:
        value = multiple_at(section, k, at, mask, 4, BLOCK)
    elif VALUES == INT3:
        value = magnitude_at(section, k, at, mask, 3)
    elif VALUES == INT2:
        value = magnitude_at(section, k, at, mask, 2)
    else:
        value = magnitude_at(section, k, at, mask, 1)
    return value


@triton.jit
def widened_bits(bits: tl.tensor) -> tl.tensor:
    """Convert the bits of bfloat16 numbers, as int32, to float32."""
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def bfloat16_bits(values: tl.tensor) -> tl.tensor:
    """Round to bfloat16, ties to even, as int32; a cast would truncate in the interpreter."""
    bits = values.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    return tl.where(values == values, rounded, 0x7FC0)


@triton.jit
def above_bits(values: tl.tensor) -> tl.tensor:
    """Round non-negative numbers up to bfloat16, as int32."""
    return (values.to(tl.int32, bitcast=True) + 0xFFFF) >> 16


@triton.jit
def saturated(values: tl.tensor, most: tl.constexpr) -> tl.tensor:
    """Limit magnitudes to `most`; NaN stays NaN."""
    least = tl.where(values < -most, -most, values)
    return tl.where(least > most, most, least)


@triton.jit
def finite(values: tl.tensor) -> tl.tensor:
    """Replace NaN and infinities by 0, and limit other magnitudes, as `Ops.finite`."""
    return saturated(tl.where(magnitude(values) < INFINITY, values, 0.0), LIMIT)


@triton.jit
def pack_floats(
    section: tl.tensor, at: tl.tensor, values: tl.tensor, mask: tl.tensor, VALUES: tl.constexpr
) -> tl.tensor:
    """Write entries `at` of a tensor's values; return what readers get, as float32."""
    if VALUES == FLOAT32:
        tl.store(section.to(tl.pointer_type(tl.float32)) + at, values, mask=mask)
        sent = values
    elif VALUES == FLOAT16:
        halves = saturated(values, FLOAT16_MAX).to(tl.float16)
        tl.store(section.to(tl.pointer_type(tl.float16)) + at, halves, mask=mask)
        sent = halves.to(tl.float32)
    else:
        bits = bfloat16_bits(saturated(values, BFLOAT16_MAX))
        tl.store(section.to(tl.pointer_type(tl.int16)) + at, bits.to(tl.int16), mask=mask)
        sent = widened_bits(bits)
    return sent


@triton.jit
def multiples(values: tl.tensor, BITS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return each block's scale as bfloat16 bits, and each value's multiple: [ROWS, BLOCK]."""
    most: tl.constexpr = (1 << (BITS - 1)) - 1
    values = finite(values)
    largest = tl.max(tl.abs(values), 1)
    scales = above_bits(tl.math.div_rn(largest, tl.full(largest.shape, most, tl.float32)))
    scale = widened_bits(scales)
    divisor = tl.broadcast_to(tl.where(scale > 0, scale, 1.0)[:, None], values.shape)
    whole = (tl.math.div_rn(values, divisor) + TO_WHOLE) - TO_WHOLE
    whole = tl.minimum(tl.maximum(whole, -most), most)
    return scales, whole


@triton.jit
def pack_multiples(
    section: tl.tensor,
    k: tl.tensor,
    row0: tl.tensor,
    values: tl.tensor,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
) -> tl.tensor:
    """Write ROWS blocks of a tensor's k values from block `row0`; return what readers get.

    values: [ROWS, BLOCK], 0 beyond the k-th.
    """
    row = row0 + tl.arange(0, ROWS)
    scales, whole = multiples(values, BITS)
    count = (k + BLOCK - 1) // BLOCK
    put_scales(section, row, scales, row < count)
    codes = whole.to(tl.int32) & ((1 << BITS) - 1)
    put_codes(section + count * 2, k, row, codes, BITS, BLOCK, ROWS)
    return whole * widened_bits(scales)[:, None]


@triton.jit
def put_scales(section: tl.tensor, at: tl.tensor, bits: tl.tensor, mask: tl.tensor) -> None:
    """Write scales `at` of a tensor, from the bits of bfloat16 numbers."""
    tl.store(section + at * 2, (bits & 0xFF).to(tl.uint8), mask=mask)
    tl.store(section + at * 2 + 1, (bits >> 8).to(tl.uint8), mask=mask)


@triton.jit
def put_codes(
    body: tl.tensor,
    k: tl.tensor,
    row: tl.tensor,
    codes: tl.tensor,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Write the codes of the blocks `row` of k values: [ROWS, BLOCK], 0 beyond the k-th."""
    share: tl.constexpr = 8 // BITS if 8 % BITS == 0 else 8  # entries in the fewest whole bytes
    wide: tl.constexpr = share * BITS // 8  # these bytes
    if share > 1:
        if share * BITS > 31:
            codes = codes.to(tl.int64)
        codes = codes << (tl.arange(0, BLOCK) % share * BITS)[None, :]
        codes = tl.sum(tl.reshape(codes, [ROWS, BLOCK // share, share]), 2)
    group = row[:, None] * (BLOCK // share) + tl.arange(0, BLOCK // share)[None, :]
    for part in tl.static_range(wide):
        byte = group * wide + part
        mask = byte < (k * BITS + 7) // 8
        tl.store(body + byte, ((codes >> (8 * part)) & 0xFF).to(tl.uint8), mask=mask)


@triton.jit
def counted(parts: tl.tensor, limit: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the number and the sum of each row's integers above a limit."""
    exceeds = parts > limit[:, None]
    return tl.sum(exceeds.to(tl.int32), 1), tl.sum(tl.where(exceeds, parts, 0), 1)


@triton.jit
def mean(count: tl.tensor, total: tl.tensor, least: tl.tensor) -> tl.tensor:
    """Return a region's mean, rounded down; of an empty region its lower limit."""
    return tl.maximum(total // tl.maximum(count, 1), least)


@triton.jit
def mean_bits(unit: tl.tensor, count: tl.tensor, total: tl.tensor) -> tl.tensor:
    """Return a region's mean magnitude, rounded to bfloat16, as int32; 0 if it is empty."""
    filled = tl.maximum(count, 1).to(tl.float64) * UNIT
    return bfloat16_bits((unit * (total.to(tl.float64) / filled)).to(tl.float32))


@triton.jit
def halved(
    parts: tl.tensor, count: tl.tensor, total: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Divide rows into two regions: return the limit, and (number, sum) of what is above it."""
    limit = mean(count, total, count * 0)
    more, most = counted(parts, limit)
    for _ in tl.static_range(ROUNDS):
        low = mean(count - more, total - most, count * 0)
        limit = (low + mean(more, most, limit)) // 2
        more, most = counted(parts, limit)
    return limit, more, most


@triton.jit
def pack_magnitudes(
    section: tl.tensor,
    k: tl.tensor,
    row0: tl.tensor,
    values: tl.tensor,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
) -> tl.tensor:
    """`pack_multiples` for values that are plus or minus one of their block's scales."""
    each: tl.constexpr = 1 << (BITS - 1)  # scales of a block
    row = row0 + tl.arange(0, ROWS)
    blocks = (k + BLOCK - 1) // BLOCK
    values = finite(values)
    magnitudes = tl.abs(values)
    unit = widened_bits(above_bits(tl.max(magnitudes, 1))).to(tl.float64)
    divisor = tl.where(unit > 0, unit, 1.0)[:, None]
    parts = tl.floor(magnitudes.to(tl.float64) / divisor * UNIT).to(tl.int32)
    count = tl.maximum(tl.minimum(k - row * BLOCK, BLOCK), 0)
    total = tl.sum(parts, 1)
    at = row * each
    there = row < blocks
    if BITS == 1:
        first = mean_bits(unit, count, total)
        put_scales(section, at, first, there)
        region = parts * 0
        scale = tl.broadcast_to(widened_bits(first)[:, None], parts.shape)
    elif BITS == 2:
        limit, more, most = halved(parts, count, total)
        first = mean_bits(unit, count - more, total - most)
        second = mean_bits(unit, more, most)
        put_scales(section, at, first, there)
        put_scales(section, at + 1, second, there)
        region = (parts > limit[:, None]).to(tl.int32)
        scale = widened_bits(tl.where(region == 1, second[:, None], first[:, None]))
    else:
        limit1, more1, most1 = halved(parts, count, total)
        limit0 = mean(count - more1, total - most1, count * 0)
        limit2 = mean(more1, most1, limit1)
        more0, most0 = counted(parts, limit0)
        more1, most1 = counted(parts, limit1)
        more2, most2 = counted(parts, limit2)
        for _ in tl.static_range(ROUNDS):
            mean0 = mean(count - more0, total - most0, count * 0)
            mean1 = mean(more0 - more1, most0 - most1, limit0)
            mean2 = mean(more1 - more2, most1 - most2, limit1)
            mean3 = mean(more2, most2, limit2)
            limit0 = (mean0 + mean1) // 2
            limit1 = (mean1 + mean2) // 2
            limit2 = (mean2 + mean3) // 2
            more0, most0 = counted(parts, limit0)
            more1, most1 = counted(parts, limit1)
            more2, most2 = counted(parts, limit2)
        first = mean_bits(unit, count - more0, total - most0)
        second = mean_bits(unit, more0 - more1, most0 - most1)
        third = mean_bits(unit, more1 - more2, most1 - most2)
        fourth = mean_bits(unit, more2, most2)
        put_scales(section, at, first, there)
        put_scales(section, at + 1, second, there)
        put_scales(section, at + 2, third, there)
        put_scales(section, at + 3, fourth, there)
        region = (parts > limit0[:, None]).to(tl.int32) + (parts > limit1[:, None]).to(tl.int32)
        region += (parts > limit2[:, None]).to(tl.int32)
        lower = tl.where(region == 1, second[:, None], first[:, None])
        upper = tl.where(region == 3, fourth[:, None], third[:, None])
        scale = widened_bits(tl.where(region < 2, lower, upper))
    minus = (values < 0).to(tl.int32)
    put_codes(section + blocks * (2 * each), k, row, region + minus * each, BITS, BLOCK, ROWS)
    return tl.where(values < 0, -scale, scale)
