"""How many bytes values and indices take, as integers; `Ops.pack_values` and others fill them.

Kinds of values: float64, float32, float16 and bfloat16, and these with one scale a block:

    int8, int4      j times the block's scale, -largest <= j <= largest
    sign            plus or minus the block's scale

Kinds of indices: int16 and int32, as they are and unsigned, and `packed`: the quasi-succinct code
of Elias (1974) and Fano (1971), whose length depends on how many there are and not on which. Over
the entropy of k places among n it has less than 0.6 bits an index.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

VALUE_BITS = {
    "float64": 64,
    "float32": 32,
    "float16": 16,
    "bfloat16": 16,
    "int8": 8,
    "int4": 4,
    "sign": 1,
}
BLOCK = {"int8": 128, "int4": 128, "sign": 1024}  # values that share a scale
LARGEST = {"int8": 127, "int4": 7}  # of the multiples of a scale
SCALE_BYTES = 2  # a scale is a bfloat16
LIMIT = 2.0**127  # where values with a scale saturate: no multiple overflows float32
UNIT = 65536  # magnitudes are whole multiples of a 65536th of the largest where they are added up
INDEX_BYTES = {"int16": 2, "int32": 4}
TILE = 512  # elements that sums of float64 fold, a power of two
SHARD_BLOCK = 512  # elements that go to one shard at a time, so that memory is read in stretches
_MOST_LOW_BITS = 31


def tiles(size: int) -> tuple[int, int]:
    """How a block that is added up is cut: so many tiles, a power of two, of so many elements."""
    if size <= TILE:
        return 1, _power_above(size)
    return _power_above(-(-size // TILE)), TILE


def added_up(tiles: Any) -> Any:
    """[blocks] sums of [blocks, tiles, elements], in the order that `Ops.sums` says."""
    while tiles.shape[2] > 1:
        half = tiles.shape[2] // 2
        tiles = tiles[:, :, :half] + tiles[:, :, half:]
    sums = tiles[:, :, 0]
    while sums.shape[1] > 1:
        sums = sums[:, ::2] + sums[:, 1::2]
    return sums[:, 0]


def _power_above(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()


def random_index(drawn: Any, numbers: Any, numel: int, shift: Any = operator.rshift) -> Any:
    """`Ops.random_index`, from [k] random numbers of 31 bits, and 0, 1, ... k."""
    ends = numbers * numel // drawn.shape[0]
    return ends[:-1] + shift(drawn * (ends[1:] - ends[:-1]), 31)


def scales(kind: str, count: int) -> int:
    """Blocks that `count` values fill."""
    return -(-count // BLOCK[kind]) if kind in BLOCK else 0


def value_bytes(kind: str, count: int) -> int:
    """Bytes of `count` values: the scales, and then the values."""
    return SCALE_BYTES * scales(kind, count) + -(-count * VALUE_BITS[kind] // 8)


@functools.lru_cache(maxsize=1 << 16)  # shards of a model come in few sizes
def low_bits(numel: int, k: int) -> int:
    """Lower bits of a packed index that are kept as they are: what makes the code shortest."""
    return min(range(_MOST_LOW_BITS + 1), key=lambda low: k * low + ((numel - k) >> low))


def high_bits(numel: int, k: int) -> int:
    """Bits of the map that has the upper parts of packed indices."""
    return k + ((numel - k) >> low_bits(numel, k))


def low_bytes(numel: int, k: int) -> int:
    """Bytes of the lower parts."""
    return -(-k * low_bits(numel, k) // 8)


def index_bytes(kind: str | None, numel: int, k: int) -> int:
    """Bytes of `k` indices into `numel` elements; none where all elements are sent."""
    if kind is None:
        return 0
    if kind in INDEX_BYTES:
        return INDEX_BYTES[kind] * k
    return low_bytes(numel, k) + -(-high_bits(numel, k) // 8)


def digits(base: int) -> int:
    """How many digits of a base one byte holds: 5 of base 3."""
    count = 1
    while base ** (count + 1) <= 256:
        count += 1
    return count


def weights(base: int) -> list[int]:
    """What the digits of a byte are multiplied by."""
    return [base**i for i in range(digits(base))]
