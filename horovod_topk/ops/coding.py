"""Sizes in bytes of encoded values and indices; `Ops.pack_values` and others encode them.

Kinds of values: float64, float32, float16 and bfloat16, and the following with scales per block:

    int8, int4      j times the block's scale, -largest <= j <= largest
    stable8         int8 with a slightly smaller scale: encoding what is decoded changes nothing
    sign            plus or minus the block's scale, its mean magnitude
    int2, int3      plus or minus one of the block's 2 or 4 scales: mean magnitudes of `regions`

Kinds of indices: int16 and int32, stored unsigned, and `packed`: the quasi-succinct code of Elias
(1974) and Fano (1971), whose length depends on the number of indices but not on their values. It
takes less than 0.6 bits for each index more than the entropy of k indices among n.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from itertools import chain, pairwise, zip_longest
from typing import Any

VALUE_BITS = {
    "float64": 64,
    "float32": 32,
    "float16": 16,
    "bfloat16": 16,
    "int8": 8,
    "stable8": 8,
    "int4": 4,
    "int3": 3,
    "int2": 2,
    "sign": 1,
}
BLOCK = {  # values that share their scales
    "int8": 128,
    "stable8": 128,
    "int4": 128,
    "int3": 1024,
    "int2": 1024,
    "sign": 1024,
}
MAGNITUDES = {"sign": 1, "int2": 2, "int3": 4}  # scales of a block, of which a value has one
LARGEST = {"int8": 127, "stable8": 127, "int4": 7}  # largest multiple of a scale
# What a block's largest magnitude is divided by for the scale. Rounded up to a bfloat16, scales are
# up to 1/128 larger: with 127 the largest multiple may be 126, which has a smaller scale itself.
DIVISOR = {"int8": 127.0, "stable8": 127.4921875, "int4": 7.0}
SCALE_BYTES = 2  # a scale is a bfloat16
LIMIT = 2.0**127  # values with a scale saturate here, so that no multiple overflows float32
STEP_MARGIN = 1 + 2.0**-20  # makes a step larger than rounding can make a quotient by it
UNIT = 65536  # for exact sums, magnitudes are multiples of largest / 65536
INDEX_BYTES = {"int16": 2, "int32": 4}
TILE = 512  # elements of a tile in float64 sums, a power of two
FLOAT_BITS = {  # dtype -> number of the mantissa's bits, and the bits of 1
    "float32": (23, 0x3F800000),
    "float64": (52, 0x3FF0000000000000),
}
SHARD_BLOCK = 512  # consecutive elements of a shard, so that memory is read in stretches
ALWAYS = 255  # code of an element that arrives in every step: 255 phi^(1/4), phi its mean
FREE = 2.0**20  # largest step of a weight in learning rates, and so finite
OFTEN = 215  # least code of how often an element arrives, phi, above 1/2: 255 phi^(1/4)
NOISE = 0x9E3779B1, 0x85EBCA77, 0x85EBCA6B, 0xC2B2AE35  # factors of `noise`
SAMPLE = 1 << 14  # elements sampled to guess a threshold; smaller tensors need no guess
_MOST_LOW_BITS = 31


def shard_numel(numel: int, parts: int, first: int) -> int:
    """Number of elements in blocks first, first + parts, ... of a tensor."""
    whole, rest = divmod(numel, SHARD_BLOCK)
    blocks = max(0, -(-(whole - first) // parts))
    return blocks * SHARD_BLOCK + (rest if whole % parts == first else 0)


def tiles(size: int) -> tuple[int, int]:
    """Number and size of the tiles of a block in `Ops.sums`; both are powers of two."""
    if size <= TILE:
        return 1, _power_above(size)
    return _power_above(-(-size // TILE)), TILE


def added_up(tiles: Any) -> Any:
    """Sum [blocks, tiles, elements] to [blocks], in the order of `Ops.sums`."""
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


def noise(at: Any, step: int) -> Any:
    """Bits that a float32 gets added before it is cut to bfloat16: so it is rounded at random.

    They depend on the element and the step alone, so that all ranks and devices round alike. The
    mix of bits is the end of MurmurHash3 (Appleby).

    Args:
        at: positions of elements, int64.
        step: number of a step.
    """
    low = 0xFFFFFFFF
    x = (at * NOISE[0] + step * NOISE[1]) & low
    x = ((x ^ (x >> 16)) * NOISE[2]) & low
    x = ((x ^ (x >> 13)) * NOISE[3]) & low
    return (x ^ (x >> 16)) & 0xFFFF


def sample_rank(count: int, k: int) -> tuple[int, int]:
    """Return the row length of `Ops.sample` and the rank r that it looks for, 0 if r < 32."""
    stride = max(count // 1024, 2048) | 1
    expected = k * (count // stride * 16) / count
    rank = math.floor(expected - 2 * math.sqrt(expected))
    return stride, rank if rank >= 32 else 0


def guess_rank(numel: int, k: int) -> tuple[int, int]:
    """Step of a strided sample, and the rank in it of what slightly more than k elements reach."""
    stride = numel // SAMPLE | 1  # odd, so that samples are from different columns
    taken = -(-numel // stride)
    expected = k * taken / numel
    return stride, min(math.ceil(expected + 4 * math.sqrt(expected)) + 1, taken)


def scales(kind: str, count: int) -> int:
    """Number of scales that `count` values have: one for each block, or several."""
    return MAGNITUDES.get(kind, 1) * -(-count // BLOCK[kind]) if kind in BLOCK else 0


Counted = tuple[Any, Any]  # for each block, the number of some magnitudes, and their sum
ROUNDS = 2  # by Lloyd's algorithm, after regions are halved


def regions(
    whole: Counted, bits: int, above: Callable[[Any], Counted]
) -> tuple[list[Any], list[Counted]]:
    """Divide each block's magnitudes into 2^(bits - 1) regions, of which each has one scale.

    Magnitudes are whole numbers of parts; arrays are int64, [blocks]. `Ops.pack_values` says how
    they are divided: regions are halved at their means, and limits then moved to the middle between
    means (Linde, Buzo and Gray 1980; Lloyd 1982).

    Args:
        whole: number and sum of all magnitudes of a block.
        bits: of a code: a sign, and the number of a region.
        above: counts and sums the magnitudes above an array of limits.

    Returns:
        The limits, in ascending order: a region has what is above its lower limit, and at most its
        upper one. For each region, the number and the sum of its magnitudes.
    """
    limits, parts = list[Any](), [whole]
    for _ in range(bits - 1):
        means = _means(limits, parts)
        limits = [each for pair in zip_longest(means, limits) for each in pair if each is not None]
        for _ in range(ROUNDS):
            means = _means(limits, _between(whole, limits, above))
            limits = [(low + high) // 2 for low, high in pairwise(means)]
        parts = _between(whole, limits, above)
    return limits, parts


def _between(whole: Counted, limits: list[Any], above: Callable[[Any], Counted]) -> list[Counted]:
    """Number and sum of the magnitudes of each region."""
    none = whole[0] * 0, whole[1] * 0
    edges = chain([whole], map(above, limits), [none])
    return [(many - few, more - less) for (many, more), (few, less) in pairwise(edges)]


def _means(limits: list[Any], parts: list[Counted]) -> list[Any]:
    """Each region's mean, rounded down; of an empty region, its lower limit."""
    found = [total // larger(count, 1) for count, total in parts]
    return [found[0], *(larger(mean, limit) for mean, limit in zip(found[1:], limits, strict=True))]


def larger(one: Any, other: Any) -> Any:
    """The larger of two whole numbers, element by element, in any framework."""
    return (one + other + abs(one - other)) // 2


def value_bytes(kind: str, count: int) -> int:
    """Bytes of `count` values: first the scales, then the values."""
    return SCALE_BYTES * scales(kind, count) + -(-count * VALUE_BITS[kind] // 8)


@functools.lru_cache(maxsize=1 << 16)  # shards of a model have few different sizes
def low_bits(numel: int, k: int) -> int:
    """Number of lower bits that packed indices store unchanged, for the shortest code."""
    return min(range(_MOST_LOW_BITS + 1), key=lambda low: k * low + ((numel - k) >> low))


def high_bits(numel: int, k: int) -> int:
    """Bits of the bitmap that encodes the upper parts of packed indices."""
    return k + ((numel - k) >> low_bits(numel, k))


def low_bytes(numel: int, k: int) -> int:
    """Bytes of the lower parts of packed indices."""
    return -(-k * low_bits(numel, k) // 8)


def index_bytes(kind: str | None, numel: int, k: int) -> int:
    """Bytes of `k` indices into `numel` elements; 0 if all elements are sent."""
    if kind is None:
        return 0
    if kind in INDEX_BYTES:
        return INDEX_BYTES[kind] * k
    return low_bytes(numel, k) + -(-high_bits(numel, k) // 8)


def digits(base: int) -> int:
    """Number of digits of a base in one byte: 5 for base 3."""
    count = 1
    while base ** (count + 1) <= 256:
        count += 1
    return count


def weights(base: int) -> list[int]:
    """Weights of the digits in a byte."""
    return [base**i for i in range(digits(base))]
