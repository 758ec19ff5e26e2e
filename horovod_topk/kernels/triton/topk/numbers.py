# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator, no-any-return"
# ruff: noqa: N803
"""Constants, table look-ups and arithmetic that all kernels share.

A key is a magnitude as an integer: the bits of |a|, which have the order of |a|; NaN is infinity.
"""

from __future__ import annotations

import triton
import triton.language as tl

from horovod_topk.kernels.triton.topk import tables
from horovod_topk.ops import coding

COLUMNS = tl.constexpr(len(tables.COLUMNS))
SHARD_BLOCK = tl.constexpr(coding.SHARD_BLOCK)
CARRIED = tl.constexpr(tables.CARRIED)
SAMPLED = tl.constexpr(tables.SAMPLED)

INFINITY = tl.constexpr(0x7F800000)  # the largest key
NOWHERE = tl.constexpr(0x7F800001)  # a carried bracket above all keys: there was no step yet
BINS = tl.constexpr(64)  # bins of a carried bracket
BIN_BITS = tl.constexpr(15)
BIN = tl.constexpr(1 << 15)  # keys in a bin
BRACKET = tl.constexpr(64 << 15)  # keys in all bins: a quarter of an octave
HALF = tl.constexpr(0xFFFF)  # two counts below 2**15 are stored in one int32

ABOVE, INSIDE, NONFINITE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # chunk stats
STATS = tl.constexpr(4)  # numbers for each chunk


@triton.constexpr_function
def place(column: str) -> int:
    """The position of a column in a table's row."""
    return list(tables.COLUMNS).index(column)


@triton.jit
def field(table: tl.tensor, t: tl.tensor, column: tl.constexpr) -> tl.tensor:
    """Load one column of tensor `t` from the table, int64."""
    return tl.load(table + t * COLUMNS + place(column))


@triton.jit
def number(table: tl.tensor, t: tl.tensor, column: tl.constexpr) -> tl.tensor:
    """Load one column of tensor `t` that is below 2**31, int32."""
    return field(table, t, column).to(tl.int32)


@triton.jit
def split_of(table: tl.tensor, t: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return how many shards the gradient of tensor `t` has, and the first block of this one."""
    return number(table, t, "parts"), number(table, t, "first")


@triton.jit
def in_gradient(at: tl.tensor, split: tl.tuple) -> tl.tensor:
    """Return where elements `at` of a shard are in its gradient. A whole one is its only shard."""
    parts, first = split
    return (at // SHARD_BLOCK * parts + first) * SHARD_BLOCK + at % SHARD_BLOCK


@triton.jit
def magnitude(a: tl.tensor) -> tl.tensor:
    """The keys of float32 elements."""
    return tl.minimum(a.to(tl.int32, bitcast=True) & 0x7FFFFFFF, INFINITY)


@triton.jit
def pointer(address: tl.tensor, DTYPE: tl.constexpr, WIDE: tl.constexpr) -> tl.tensor:
    """Return the pointer of an address. WIDE: it is a multiple of 16, for wide accesses.

    Triton forgets what is known of an address when it becomes a pointer.
    """
    found = address.to(tl.pointer_type(DTYPE))
    if WIDE:
        found = tl.multiple_of(found, 16)
    return found


@triton.jit
def payloads_of(table: tl.tensor, t: tl.tensor, addresses: tl.tensor) -> tl.tensor:
    """Return a pointer to the payloads of all ranks that have tensor `t`."""
    return pointer(tl.load(addresses + field(table, t, "payload")), tl.uint8, False)


@triton.jit
def widened(address: tl.tensor, at: tl.tensor, mask: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Load elements `at` of a gradient as float32; zero where not `mask`, if there is one.

    Without a mask the address is a multiple of 16.
    """
    if DTYPE == 0:
        pointers = pointer(address, tl.float16, mask is None) + at
    elif DTYPE == 1:
        pointers = pointer(address, tl.bfloat16, mask is None) + at
    else:
        pointers = pointer(address, tl.float32, mask is None) + at
    if mask is None:
        g = tl.load(pointers)
    else:
        g = tl.load(pointers, mask=mask, other=0.0)
    return g.to(tl.float32)


@triton.jit
def gradient(
    address: tl.tensor, dtype: tl.tensor, at: tl.tensor, mask: tl.tensor, KIND: tl.constexpr
) -> tl.tensor:
    """As `widened`, for a dtype that may be known only at run time (KIND 3)."""
    if KIND < 3:
        g = widened(address, at, mask, KIND)
    else:
        if dtype == 0:
            g = widened(address, at, mask, 0)
        elif dtype == 1:
            g = widened(address, at, mask, 1)
        else:
            g = widened(address, at, mask, 2)
    return g
