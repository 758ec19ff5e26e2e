# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator, no-any-return"
# ruff: noqa: N803
"""Fourth pass of an encode: indices and values of all entries, and the residual that they leave.

One program encodes some consecutive blocks of one tensor's entries, a parcel. It reads the elements
that the indices in scratch memory name, or all elements of a tensor that has no index.
"""

from __future__ import annotations

import triton
import triton.language as tl

from horovod_topk.kernels.triton.topk.formats import (
    BFLOAT16,
    INT2,
    INT3,
    INT4,
    INT8,
    pack_floats,
    pack_magnitudes,
    pack_multiples,
)
from horovod_topk.kernels.triton.topk.index_coding import put_indices
from horovod_topk.kernels.triton.topk.numbers import field, number


@triton.jit
def pack(
    table: tl.tensor,
    owners: tl.tensor,
    candidate: tl.tensor,
    payload: tl.tensor,
    indices: tl.tensor,
    VALUES: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Encode the entries of one parcel, which has ROWS blocks: the kernel of the fourth pass."""
    parcel = tl.program_id(0)
    t = tl.load(owners + parcel)
    k = number(table, t, "k")
    row0 = (parcel - number(table, t, "parcel0")) * ROWS
    entry = (row0 + tl.arange(0, ROWS))[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    there = entry < k
    place = entry
    if number(table, t, "coding") > 0:
        mine = indices + field(table, t, "entry0") + entry
        place = tl.load(mine, mask=there, other=0)
        put_indices(payload, table, t, entry, place, there)
    elements = candidate + number(table, t, "start") + place
    a = tl.load(elements, mask=there, other=0.0)
    values = payload + field(table, t, "value_at")
    if VALUES <= BFLOAT16:
        sent = pack_floats(values, entry, a, there, VALUES)
    elif VALUES == INT8:
        sent = pack_multiples(values, k, row0, a, 8, BLOCK, ROWS)
    elif VALUES == INT4:
        sent = pack_multiples(values, k, row0, a, 4, BLOCK, ROWS)
    elif VALUES == INT3:
        sent = pack_magnitudes(values, k, row0, a, 3, BLOCK, ROWS)
    elif VALUES == INT2:
        sent = pack_magnitudes(values, k, row0, a, 2, BLOCK, ROWS)
    else:
        sent = pack_magnitudes(values, k, row0, a, 1, BLOCK, ROWS)
    tl.store(elements, a - sent, mask=there)  # NaN or infinite where `a` is
