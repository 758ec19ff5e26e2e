# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator, no-any-return"
# ruff: noqa: N803
"""First pass of an encode: candidate = residual + gradient, one program for each chunk.

If entries are selected by weighted elements, these are written beside the candidate arena. Keys
near the threshold of the step before are counted and stored, so that the next pass need not read
all elements again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from horovod_topk.kernels.triton.topk.numbers import (
    ABOVE,
    BIN_BITS,
    BINS,
    BRACKET,
    CARRIED,
    CHUNK0,
    DTYPE,
    INFINITY,
    INSIDE,
    NONFINITE,
    NOWHERE,
    NUMEL,
    RULE,
    START,
    STATS,
    WIDTH,
    gradient,
    magnitude,
    number,
)
from horovod_topk.kernels.triton.topk.weigh import weighted


@triton.jit
def compensated(
    residual: tl.tensor,
    candidate: tl.tensor,
    address: tl.tensor,
    dtype: tl.tensor,
    at: tl.tensor,
    numel: tl.tensor,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
    WHOLE: tl.constexpr,
) -> tl.tensor:
    """e + g of the tile from element `at`, written to the candidate arena; zeros past the end.

    WHOLE: the tile is within the tensor, at addresses that are multiples of 16: wide accesses.
    """
    lanes = tl.multiple_of(at, TILE) + tl.arange(0, TILE)
    if WHOLE:
        a = tl.load(residual + lanes) + gradient(
            tl.multiple_of(address, 16), dtype, lanes, None, KIND
        )
        tl.store(candidate + lanes, a)
    else:
        inside = lanes < numel
        e = tl.load(residual + lanes, mask=inside, other=0.0)
        a = e + gradient(address, dtype, lanes, inside, KIND)
        tl.store(candidate + lanes, a, mask=inside)
    return a


@triton.jit
def put_aside(
    key: tl.tensor,
    low: tl.tensor,
    slot: tl.tensor,
    above: tl.tensor,
    inside: tl.tensor,
    SLOT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Append the keys within the carried bracket to a slot; return both counts."""
    high = low + BRACKET
    mine = (key >= low) & (key < high)
    at = inside + tl.cumsum(mine.to(tl.int32), 0) - 1
    tl.store(slot + at, key, mask=mine & (at < SLOT))
    both = tl.sum(mine.to(tl.int32) + ((key >= high).to(tl.int32) << 16), 0)
    return above + (both >> 16), inside + (both & 0xFFFF)


@triton.jit
def add_tile(
    residual: tl.tensor,
    candidate: tl.tensor,
    address: tl.tensor,
    dtype: tl.tensor,
    squares: tl.tensor,
    least: tl.tensor,
    products: tl.tensor,
    at: tl.tensor,
    numel: tl.tensor,
    low: tl.tensor,
    slot: tl.tensor,
    above: tl.tensor,
    inside: tl.tensor,
    KIND: tl.constexpr,
    WEIGHS: tl.constexpr,
    TILE: tl.constexpr,
    SLOT: tl.constexpr,
    WHOLE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add a tile: return both counts, and the largest magnitude of e + g as a key."""
    a = compensated(residual, candidate, address, dtype, at, numel, KIND, TILE, WHOLE)
    key = magnitude(a)
    largest = tl.max(key, 0)  # 0 past the end
    lanes = tl.multiple_of(at, TILE) + tl.arange(0, TILE)
    if WEIGHS:
        mask = None if WHOLE else lanes < numel
        product = weighted(a, squares, lanes, mask, least)
        tl.store(products + lanes, product, mask=mask)
        key = magnitude(product)
    if not WHOLE:
        key = tl.where(lanes < numel, key, -1)
    if low < NOWHERE:
        above, inside = put_aside(key, low, slot, above, inside, SLOT)
    return above, inside, largest


@triton.jit
def histogram(
    elements: tl.tensor,
    slot: tl.tensor,
    low: tl.tensor,
    inside: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    TILE: tl.constexpr,
    SLOT: tl.constexpr,
) -> tl.tensor:
    """The number of a chunk's keys in each bin of the carried bracket.

    This reads what other threads of this program stored: the caller has placed a barrier before it.
    Invalid lanes are counted in bin 0 and subtracted again.
    """
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
    table: tl.tensor,
    owners: tl.tensor,
    addresses: tl.tensor,
    squares: tl.tensor,
    leasts: tl.tensor,
    carried: tl.tensor,
    residual: tl.tensor,
    candidate: tl.tensor,
    products: tl.tensor,
    stats: tl.tensor,
    slots: tl.tensor,
    histograms: tl.tensor,
    KIND: tl.constexpr,
    WEIGHS: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    SLOT: tl.constexpr,
) -> None:
    """Add gradients to the residuals of one chunk.

    stats: [chunks, STATS]; slots: [chunks, SLOT]; histograms: [chunks, BINS].
    squares, leasts: see `weigh`; used only if WEIGHS, as `products` is, for weighted elements.
    """
    chunk = tl.program_id(0)
    t = tl.load(owners + chunk)
    numel, start = number(table, t, NUMEL), number(table, t, START)
    dtype, address = number(table, t, DTYPE), tl.load(addresses + t)
    square, least = address, 0  # not used unless WEIGHS
    if WEIGHS:
        square, least = tl.load(squares + t), tl.load(leasts + t)
    first = (chunk - number(table, t, CHUNK0)) * CHUNK
    last = tl.minimum(first + CHUNK, numel)
    low, largest, above, inside = NOWHERE, 0, 0, 0
    if (number(table, t, RULE) == CARRIED) & (number(table, t, WIDTH) > 0):
        low = tl.load(carried + t)
    slot = slots + chunk.to(tl.int64) * SLOT
    aligned = (address % 16 == 0) & (square % 16 == 0) & (start % 4 == 0)
    for at in range(first, last, TILE):
        if aligned & (at + TILE <= numel):
            from4 = tl.multiple_of(start, 4)
            above, inside, top = add_tile(
                residual + from4, candidate + from4, address, dtype, tl.multiple_of(square, 16),
                least, products + from4, at, numel, low, slot, above, inside,
                KIND, WEIGHS, TILE, SLOT, True,
            )  # fmt: skip
        else:
            above, inside, top = add_tile(
                residual + start, candidate + start, address, dtype, square,
                least, products + start, at, numel, low, slot, above, inside,
                KIND, WEIGHS, TILE, SLOT, False,
            )  # fmt: skip
        largest = tl.maximum(largest, top)
    if low < NOWHERE:
        tl.debug_barrier()  # orders this program's stores before its loads
        elements = candidate + start
        if WEIGHS:
            elements = products + start
        counts = histogram(elements, slot, low, inside, first, last, TILE, SLOT)
        bins = tl.arange(0, BINS)
        tl.store(histograms + chunk * BINS + bins, counts.to(tl.int16))
    tl.store(stats + chunk * STATS + ABOVE, above)
    tl.store(stats + chunk * STATS + INSIDE, inside)
    tl.store(stats + chunk * STATS + NONFINITE, (largest == INFINITY).to(tl.int32))
