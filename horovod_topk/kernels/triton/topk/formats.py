# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator, no-any-return"
# ruff: noqa: N803
"""Formats of values and indices in a payload: load entries, and encode values.

`horovod_topk.ops.protocol.Ops.pack_values` defines the formats. int8, int4 and sign have a bfloat16
scale for each block of entries, then a multiple of it for each entry. A tensor's values may begin
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
INT4 = tl.constexpr(tables.INT4)
BLOCK = tl.constexpr(coding.BLOCK["int4"])  # entries that share a scale; also for int8
SIGN_BLOCK = tl.constexpr(coding.BLOCK["sign"])
LIMIT = tl.constexpr(coding.LIMIT)
UNIT = tl.constexpr(float(coding.UNIT))
FLOAT16_MAX = tl.constexpr(65504.0)
BFLOAT16_MAX = tl.constexpr(2.0**128 - 2.0**120)
TO_WHOLE = tl.constexpr(1.5 * 2.0**23)  # adding it rounds to a whole number, ties to even


@triton.jit
def halves_at(section: tl.tensor, at: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Load the 16-bit indices at positions `at`, as int32."""
    pointers = section.to(tl.pointer_type(tl.int16)) + at
    return tl.load(pointers, mask=mask, other=0).to(tl.int32) & 0xFFFF


@triton.jit
def words_at(section: tl.tensor, at: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Load the 32-bit indices at positions `at`; those of 2**31 and more become negative."""
    return tl.load(section.to(tl.pointer_type(tl.int32)) + at, mask=mask, other=0)


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
    share: tl.constexpr = 8 // BITS  # entries in a byte
    scales = section + at // BLOCK * 2
    low = tl.load(scales, mask=mask, other=0).to(tl.int32)
    high = tl.load(scales + 1, mask=mask, other=0).to(tl.int32)
    body = section + (k + BLOCK - 1) // BLOCK * 2
    byte = tl.load(body + at // share, mask=mask, other=0).to(tl.int32)
    code = (byte >> (at % share * BITS)) & ((1 << BITS) - 1)
    if BITS == 1:
        multiple = 1 - 2 * code
    else:
        multiple = (code ^ (1 << (BITS - 1))) - (1 << (BITS - 1))
    return multiple.to(tl.float32) * widened_bits(low | (high << 8))


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
    else:
        value = multiple_at(section, k, at, mask, 1, SIGN_BLOCK)
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
def mean_bits(magnitudes: tl.tensor, largest: tl.tensor, filled: tl.tensor) -> tl.tensor:
    """Return mean magnitudes of blocks with `filled` entries, rounded to bfloat16, as int32."""
    unit = widened_bits(above_bits(largest)).to(tl.float64)
    divisor = tl.where(unit > 0, unit, 1.0)[:, None]
    total = tl.sum(tl.floor(magnitudes.to(tl.float64) / divisor * UNIT), 1)
    mean = unit * (total / (tl.maximum(filled, 1).to(tl.float64) * UNIT))
    return bfloat16_bits(mean.to(tl.float32))


@triton.jit
def multiples(
    values: tl.tensor, filled: tl.tensor, BITS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return (each block's scale as bfloat16 bits, each value's multiple of it) of [ROWS, BLOCK].

    filled: number of entries of each block; the others are 0.
    """
    values = finite(values)
    magnitudes = tl.abs(values)
    largest = tl.max(magnitudes, 1)
    if BITS == 1:
        scales = mean_bits(magnitudes, largest, filled)
        whole = tl.where(values < 0, -1.0, 1.0)
    else:
        most: tl.constexpr = (1 << (BITS - 1)) - 1
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
    share: tl.constexpr = 8 // BITS  # entries in a byte
    row = row0 + tl.arange(0, ROWS)
    scales, whole = multiples(values, tl.minimum(k - row * BLOCK, BLOCK), BITS)
    count = (k + BLOCK - 1) // BLOCK
    tl.store(section + row * 2, (scales & 0xFF).to(tl.uint8), mask=row < count)
    tl.store(section + row * 2 + 1, (scales >> 8).to(tl.uint8), mask=row < count)
    if BITS == 1:
        codes = (whole < 0).to(tl.int32)
    else:
        codes = whole.to(tl.int32) & ((1 << BITS) - 1)
    if share > 1:
        codes = codes << (tl.arange(0, BLOCK) % share * BITS)[None, :]
        codes = tl.sum(tl.reshape(codes, [ROWS, BLOCK // share, share]), 2)
    byte = row[:, None] * (BLOCK // share) + tl.arange(0, BLOCK // share)[None, :]
    mask = byte < (k + share - 1) // share
    tl.store(section + count * 2 + byte, codes.to(tl.uint8), mask=mask)
    return whole * widened_bits(scales)[:, None]
