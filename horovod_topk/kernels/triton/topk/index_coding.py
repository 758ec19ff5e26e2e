# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator, no-any-return"
# ruff: noqa: N803
"""Formats of indices in a payload: encode indices, and decode those of all payloads.

`horovod_topk.methods.topk` defines the formats. Kernels have indices as int32 in scratch memory;
a payload has them in 16 or 32 bits each, or packed (Elias 1974, Fano 1971). Packed indices are bits
in two places: the lower bits of each, and a map with a bit for each.

- Encode: every entry knows its bits and where they are, so that entries are independent. Bits of
  several programs can be in one word, and are added to it by atomic operations.
- Decode: an entry's number is the number of set bits before its own in the map. One program decodes
  a run's share of a map. It counts the bits of the shares before, so that no program waits for
  another, and then numbers its own by a cumulative sum.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr, tensor

from horovod_topk.kernels.triton.topk import tables
from horovod_topk.kernels.triton.topk.numbers import field, number, payloads_of

PACKED, SHORT = tl.constexpr(tables.PACKED), tl.constexpr(tables.SHORT)


@triton.jit
def words_from(payload: tensor, at: tensor) -> tuple[tensor, tensor]:
    """Return a pointer to the 32-bit word that has byte `at`, and the number of bits before it."""
    aside = at % 4
    words = (payload + (at - aside)).to(tl.pointer_type(tl.uint32))
    return words, aside.to(tl.int32) * 8


@triton.jit
def put_bits(words: tensor, at: tensor, value: tensor, width: tensor, mask: tensor) -> None:
    """Write numbers of fewer than 32 bits, each from bit `at` on, to words that are zero there."""
    value, shift, here = value.to(tl.uint32), at & 31, words + (at >> 5)
    tl.atomic_or(here, value << shift, mask=mask, sem="relaxed")
    rest = (value >> 1) >> (-shift + 31)  # no shift by 32, which is not defined
    tl.atomic_or(here + 1, rest, mask=mask & (shift + width > 32), sem="relaxed")


@triton.jit
def bits_at(words: tensor, at: tensor, width: tensor, mask: tensor) -> tensor:
    """Load numbers of `width` bits, fewer than 32, each from bit `at` on, as int32."""
    shift, here = at & 31, words + (at >> 5)
    low = tl.load(here, mask=mask, other=0) >> shift
    high = tl.load(here + 1, mask=mask & (shift + width > 32), other=0)
    return (low | ((high << 1) << (-shift + 31))).to(tl.int32) & ((1 << width) - 1)


@triton.jit
def map_of(table: tensor, t: tensor) -> tuple[tensor, tensor, tensor]:
    """Return the lower bits of each index of tensor `t`, the map's first byte, and its bits."""
    k, low = number(table, t, "k"), number(table, t, "low")
    at = field(table, t, "index_at") + (k * low + 7) // 8
    return low, at, k + ((number(table, t, "numel") - k) >> low)


@triton.jit
def clear(payload: tensor, table: tensor, t: tensor, place: tensor, LANES: constexpr) -> None:
    """Set the share of run number `place` in the tensor's packed indices to zero."""
    if number(table, t, "coding") == PACKED:
        _, map_at, bits = map_of(table, t)
        at = field(table, t, "index_at")
        size, runs = (map_at - at).to(tl.int32) + (bits + 7) // 8, number(table, t, "runs")
        share = (size + runs - 1) // runs
        last = tl.minimum((place + 1) * share, size)
        for byte in range(place * share, last, LANES):
            lanes = byte + tl.arange(0, LANES)
            tl.store(payload + at + lanes, tl.zeros([LANES], tl.uint8), mask=lanes < last)


@triton.jit
def put_indices(
    payload: tensor, table: tensor, t: tensor, entry: tensor, index: tensor, mask: tensor
) -> None:
    """Write the indices of some entries of tensor `t` in the payload's format."""
    coding, at = number(table, t, "coding"), field(table, t, "index_at")
    if coding == PACKED:
        low, map_at, _ = map_of(table, t)
        x = index - entry
        words, first = words_from(payload, at)
        if low > 0:
            put_bits(words, first + entry * low, x & ((1 << low) - 1), low, mask)
        words, first = words_from(payload, map_at)
        bit = first + (x >> low) + entry
        one = tl.full(entry.shape, 1, tl.uint32) << (bit & 31)
        tl.atomic_or(words + (bit >> 5), one, mask=mask, sem="relaxed")
    elif coding == SHORT:
        pointers = (payload + at).to(tl.pointer_type(tl.int16)) + entry
        tl.store(pointers, index.to(tl.int16), mask=mask)
    else:
        tl.store((payload + at).to(tl.pointer_type(tl.int32)) + entry, index, mask=mask)


@triton.jit
def set_bits(words: tensor) -> tensor:
    """Count the set bits of each word: of pairs of bits first, then of fours, then of bytes."""
    pairs = words - ((words >> 1) & 0x55555555)
    fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    return ((((fours + (fours >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def bits_before(words: tensor, first: tensor, last: tensor, LANES: constexpr) -> tensor:
    """Count the set bits of words [0, last), except the lowest `first` of the first word."""
    found = tl.zeros([LANES], tl.int32)
    for at in range(0, last, LANES):
        lanes = at + tl.arange(0, LANES)
        word = tl.load(words + lanes, mask=lanes < last, other=0)
        aside = tl.where(lanes == 0, first, 0)
        found += set_bits((word >> aside) << aside)
    return tl.sum(found, 0)


@triton.jit
def unpack_share(
    own: tl.tuple, place: tensor, payload: tensor, indices: tensor, LANES: constexpr
) -> None:
    """Decode the indices of run number `place` of a tensor from its share of the words of a map."""
    table, t = own
    k, runs = number(table, t, "k"), number(table, t, "runs")
    low, map_at, bits = map_of(table, t)
    lower, lower_first = words_from(payload, field(table, t, "index_at"))
    words, first = words_from(payload, map_at)
    count = (first + bits + 31) >> 5
    share = (count + runs - 1) // runs
    begin, end = tl.minimum(place * share, count), tl.minimum((place + 1) * share, count)
    done = bits_before(words, first, begin, LANES)
    for at in range(begin * 32, end * 32, LANES):
        bit = at + tl.arange(0, LANES)
        there = (bit >= first) & (bit < tl.minimum(first + bits, end * 32))
        word = tl.load(words + (bit >> 5), mask=there, other=0)
        one = ((word >> (bit & 31)) & 1).to(tl.int32)
        entry = done + tl.cumsum(one, 0) - one
        mine = (one == 1) & (entry < k)  # noise may have more bits
        x = (bit - first - entry) << low
        x |= bits_at(lower, lower_first + entry * low, low, mine)
        tl.store(indices + entry, x + entry, mask=mine)
        done += tl.sum(one, 0)


@triton.jit
def copy_share(
    own: tl.tuple, place: tensor, payload: tensor, indices: tensor, LANES: constexpr
) -> None:
    """Copy the share of run number `place` of a tensor's plain indices, as 32-bit ones."""
    table, t = own
    k, runs = number(table, t, "k"), number(table, t, "runs")
    section = payload + field(table, t, "index_at")
    share = (k + runs - 1) // runs
    last = tl.minimum((place + 1) * share, k)
    for at in range(place * share, last, LANES):
        entry = at + tl.arange(0, LANES)
        there = entry < last
        if number(table, t, "coding") == SHORT:
            halves = section.to(tl.pointer_type(tl.int16)) + entry
            index = tl.load(halves, mask=there, other=0).to(tl.int32) & 0xFFFF
        else:
            words = section.to(tl.pointer_type(tl.int32)) + entry
            index = tl.load(words, mask=there, other=0)
        tl.store(indices + entry, index, mask=there)


@triton.jit
def unpack(
    table: tensor,
    run_owners: tensor,
    addresses: tensor,
    indices: tensor,
    entries: tensor,
    LANES: constexpr,
) -> None:
    """Decode the indices of one run of one payload. indices: [ranks, entries].

    addresses: as in `gather`.
    """
    run, rank = tl.program_id(0), tl.program_id(1).to(tl.int64)
    t = tl.load(run_owners + run)
    place, own = run - number(table, t, "run0"), (table, t)
    payload = payloads_of(table, t, addresses) + rank * field(table, t, "payload_bytes")
    mine = indices + rank * entries + field(table, t, "entry0")
    if number(table, t, "coding") == PACKED:
        unpack_share(own, place, payload, mine, LANES)
    else:
        copy_share(own, place, payload, mine, LANES)
