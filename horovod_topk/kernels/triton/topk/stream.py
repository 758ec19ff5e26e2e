# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator, no-any-return"
# ruff: noqa: N803
"""First pass of an encode: candidate = residual + gradient, one program for each chunk.

If entries are selected by weighted elements, these are written beside the candidate arena. Keys
near the threshold of the step before are counted and stored, so that the next pass need not read
all elements again.

Weights are those of `horovod_topk.ops.protocol.Ops.weighted`: a program first finds the least
square that counts in its tensor, from a sample. This pass multiplies e + g by weights, and the
others select by the products.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr, tensor

from horovod_topk.kernels.triton.topk.numbers import (
    ABOVE,
    BIN_BITS,
    BINS,
    BRACKET,
    CARRIED,
    INFINITY,
    INSIDE,
    NONFINITE,
    NOWHERE,
    STATS,
    field,
    gradient,
    in_gradient,
    magnitude,
    number,
    split_of,
    widened,
)

TOP_WEIGHT = tl.constexpr(0x3F800000 // 4 * 5)  # 5/4 of the bits of 1
MANTISSA = tl.constexpr(23)  # its bits
BELOW = tl.constexpr(7)  # binary orders of magnitude from the mean to the least square
ROWS, LEAST_ROW, TAKEN = tl.constexpr(64), tl.constexpr(16), tl.constexpr(16)
ROOM = tl.constexpr(512)  # elements of a sample that are added at once


@triton.jit
def floor(table: tensor, t: tensor, address: tensor, WEIGHS: constexpr) -> tensor:
    """Return the least square that counts in tensor `t`, as bits.

    address: of the squares, 0 for a tensor that has none. WEIGHS: see `stream`.
    """
    numel = number(table, t, "numel")
    stride = tl.maximum(numel // ROWS, LEAST_ROW) | 1
    count = tl.where(address != 0, numel // stride * TAKEN, 0)
    total, split = tl.zeros([ROOM], tl.float64), split_of(table, t)
    for begin in range(0, count, ROOM):
        lanes = begin + tl.arange(0, ROOM)
        at = in_gradient(lanes // TAKEN * stride + lanes % TAKEN, split)
        total += widened(address, at, lanes < count, WEIGHS).to(tl.float64)
    mean = (tl.sum(total, 0) / tl.maximum(count, 1).to(tl.float64)).to(tl.float32)
    bits = mean.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    least = tl.maximum((bits >> MANTISSA) - BELOW, 0) << MANTISSA
    return tl.where(bits != 0, least, INFINITY)


@triton.jit
def weighted(
    a: tensor, squares: tensor, at: tensor, mask: tensor, least: tensor, WEIGHS: constexpr
) -> tensor:
    """Multiply elements `at` of a tensor by their weights; `squares` is an address, or 0."""
    if squares != 0:
        bits = widened(squares, at, mask, WEIGHS).to(tl.int32, bitcast=True)
        bits = tl.maximum(bits & 0x7FFFFFFF, least)
        weights = -(bits >> 2) + TOP_WEIGHT
        a = weights.to(tl.float32, bitcast=True) * a
    return a


@triton.jit
def compensated(
    arenas: tl.tuple,
    source: tl.tuple,
    at: tensor,
    numel: tensor,
    KIND: constexpr,
    TILE: constexpr,
    WHOLE: constexpr,
) -> tensor:
    """e + g of the tile from element `at`, written to the candidate arena; zeros past the end.

    WHOLE: the tile is within the tensor, at addresses that are multiples of 16: wide accesses.
    """
    residual, candidate, _ = arenas
    address, dtype, split = source
    lanes = tl.multiple_of(at, TILE) + tl.arange(0, TILE)
    places = in_gradient(lanes, split)
    if WHOLE:
        a = tl.load(residual + lanes) + gradient(address, dtype, places, None, KIND)
        tl.store(candidate + lanes, a)
    else:
        inside = lanes < numel
        e = tl.load(residual + lanes, mask=inside, other=0.0)
        a = e + gradient(address, dtype, places, inside, KIND)
        tl.store(candidate + lanes, a, mask=inside)
    return a


@triton.jit
def put_aside(key: tensor, near: tl.tuple, counts: tl.tuple, SLOT: constexpr) -> tl.tuple:
    """Append the keys within the carried bracket to a slot; return both counts."""
    low, slot = near
    above, inside = counts
    high = low + BRACKET
    mine = (key >= low) & (key < high)
    at = inside + tl.cumsum(mine.to(tl.int32), 0) - 1
    tl.store(slot + at, key, mask=mine & (at < SLOT))
    both = tl.sum(mine.to(tl.int32) + ((key >= high).to(tl.int32) << 16), 0)
    return above + (both >> 16), inside + (both & 0xFFFF)


@triton.jit
def add_tile(
    arenas: tl.tuple,
    source: tl.tuple,
    weights: tl.tuple,
    near: tl.tuple,
    counts: tl.tuple,
    at: tensor,
    numel: tensor,
    KIND: constexpr,
    WEIGHS: constexpr,
    TILE: constexpr,
    SLOT: constexpr,
    WHOLE: constexpr,
) -> tuple[tensor, tensor, tensor]:
    """Add a tile: return both counts, and the largest magnitude of e + g as a key.

    arenas: of residual, candidate and products. source: a gradient's address, dtype and split.
    weights: the squares' address and the least one. near: the carried bracket's lowest key, and
    its slot.
    """
    a = compensated(arenas, source, at, numel, KIND, TILE, WHOLE)
    above, inside = counts
    key = magnitude(a)
    largest = tl.max(key, 0)  # 0 past the end
    lanes = tl.multiple_of(at, TILE) + tl.arange(0, TILE)
    if WEIGHS >= 0:
        mask = None if WHOLE else lanes < numel
        places = in_gradient(lanes, source[2])
        product = weighted(a, weights[0], places, mask, weights[1], WEIGHS)
        tl.store(arenas[2] + lanes, product, mask=mask)
        key = magnitude(product)
    if not WHOLE:
        key = tl.where(lanes < numel, key, -1)
    if near[0] < NOWHERE:
        above, inside = put_aside(key, near, counts, SLOT)
    return above, inside, largest


@triton.jit
def histogram(
    elements: tensor,
    near: tl.tuple,
    inside: tensor,
    span: tl.tuple,
    TILE: constexpr,
    SLOT: constexpr,
) -> tensor:
    """The number of a chunk's keys in each bin of the carried bracket.

    This reads what other threads of this program stored: the caller has placed a barrier before it.
    Invalid lanes are counted in bin 0 and subtracted again.
    """
    low, slot = near
    first, last = span
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    if inside <= SLOT:
        lanes = tl.arange(0, SLOT)
        key = tl.load(slot + lanes, mask=lanes < inside, other=0)
        found = tl.where(lanes < inside, (key - low) >> BIN_BITS, 0)
        counts += tl.histogram(found, BINS) - tl.where(bins == 0, SLOT - inside, 0)
    else:
        for at in range(first, last, TILE):
            lanes = at + tl.arange(0, TILE)
            key = magnitude(tl.load(elements + lanes, mask=lanes < last, other=0.0))
            mine = (lanes < last) & (key >= low) & (key < low + BRACKET)
            found = tl.where(mine, (key - low) >> BIN_BITS, 0)
            other = TILE - tl.sum(mine.to(tl.int32), 0)
            counts += tl.histogram(found, BINS) - tl.where(bins == 0, other, 0)
    return counts


@triton.jit
def stream(
    table: tensor,
    owners: tensor,
    addresses: tensor,
    squares: tensor,
    carried: tensor,
    residual: tensor,
    candidate: tensor,
    products: tensor,
    stats: tensor,
    slots: tensor,
    histograms: tensor,
    KIND: constexpr,
    WEIGHS: constexpr,
    TILE: constexpr,
    CHUNK: constexpr,
    SLOT: constexpr,
) -> None:
    """Add gradients to the residuals of one chunk.

    stats: [chunks, STATS]; slots: [chunks, SLOT]; histograms: [chunks, BINS].
    squares: addresses of the squares; not used, as `products` for weighted elements is not, if
        WEIGHS is -1. It is the dtype of the squares, as in a recipe.
    """
    chunk = tl.program_id(0)
    t = tl.load(owners + chunk)
    numel, start = number(table, t, "numel"), number(table, t, "start")
    of = field(table, t, "gradient")
    dtype, address = number(table, t, "dtype"), tl.load(addresses + of)
    square, least = address, 0
    if WEIGHS >= 0:
        square = tl.load(squares + of)
        least = floor(table, t, square, WEIGHS)
    first = (chunk - number(table, t, "chunk0")) * CHUNK
    last = tl.minimum(first + CHUNK, numel)
    low, largest, above, inside = NOWHERE, 0, 0, 0
    if (number(table, t, "rule") == CARRIED) & (number(table, t, "coding") > 0):
        low = tl.load(carried + t)
    slot = slots + chunk.to(tl.int64) * SLOT
    near, weights = (low, slot), (square, least)
    source = address, dtype, split_of(table, t)
    arenas = residual + start, candidate + start, products + start
    aligned = (address % 16 == 0) & (square % 16 == 0) & (start % 4 == 0)
    for at in range(first, last, TILE):
        if aligned & (at + TILE <= numel):
            four = tl.multiple_of(start, 4)
            above, inside, top = add_tile(
                (residual + four, candidate + four, products + four), source,
                weights, near, (above, inside), at, numel,
                KIND, WEIGHS, TILE, SLOT, True,
            )  # fmt: skip
        else:
            above, inside, top = add_tile(
                arenas, source, weights, near, (above, inside), at, numel,
                KIND, WEIGHS, TILE, SLOT, False,
            )  # fmt: skip
        largest = tl.maximum(largest, top)
    if low < NOWHERE:
        tl.debug_barrier()  # orders this program's stores before its loads
        elements = candidate + start
        if WEIGHS >= 0:
            elements = products + start
        counts = histogram(elements, near, inside, (first, last), TILE, SLOT)
        bins = tl.arange(0, BINS)
        tl.store(histograms + chunk * BINS + bins, counts.to(tl.int16))
    tl.store(stats + chunk * STATS + ABOVE, above)
    tl.store(stats + chunk * STATS + INSIDE, inside)
    tl.store(stats + chunk * STATS + NONFINITE, (largest == INFINITY).to(tl.int32))
