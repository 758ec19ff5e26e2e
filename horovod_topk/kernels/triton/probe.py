# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator, no-any-return"
# ruff: noqa: N803
"""Whether gradients still encode to what a payload holds, judged by the first entries."""

from __future__ import annotations

import triton
import triton.language as tl

from horovod_topk.kernels.triton.gather import index_at, value_at
from horovod_topk.kernels.triton.numbers import (
    DTYPE,
    INDEX_AT,
    NUMEL,
    START,
    VALUE_AT,
    WIDTH,
    K,
    field,
    number,
    quantise16,
    widened,
)

PROBE = tl.constexpr(16)  # entries a tensor, as `horovod_topk.core.codec.PROBE`


@triton.jit
def changed(
    table: tl.tensor,
    addresses: tl.tensor,
    residual: tl.tensor,
    payload: tl.tensor,
    tensors: tl.tensor,
    HALVES: tl.constexpr,
    LANES: tl.constexpr,
) -> tl.tensor:
    """How many of the first entries of all tensors would be others now; not exactly how many."""
    wrong = tl.zeros([LANES], tl.int32)
    for at in range(0, tensors * PROBE, LANES):
        lanes = at + tl.arange(0, LANES)
        t = tl.minimum(lanes // PROBE, tensors - 1)
        entry, width, dtype = lanes % PROBE, number(table, t, WIDTH), number(table, t, DTYPE)
        there = (lanes < tensors * PROBE) & (entry < number(table, t, K))
        index = index_at(payload + field(table, t, INDEX_AT), entry, width, there & (width > 0))
        index = tl.where(width == 0, entry, index)
        inside = there & (index >= 0) & (index < number(table, t, NUMEL))
        address = tl.load(addresses + t)
        a = tl.load(residual + number(table, t, START) + index, mask=inside, other=0.0)
        a += widened(address, index, inside & (dtype == 0), 0)
        a += widened(address, index, inside & (dtype == 1), 1)
        a += widened(address, index, inside & (dtype == 2), 2)
        if HALVES:
            a = quantise16(a).to(tl.float32)
        sent = value_at(payload + field(table, t, VALUE_AT), entry, there, HALVES)
        alike = (a == sent) | ((a != a) & (sent != sent))
        wrong += (there & ((alike == 0) | (inside == 0))).to(tl.int32)
    return tl.sum(wrong, 0)


@triton.jit
def probe(
    table: tl.tensor,
    addresses: tl.tensor,
    residual: tl.tensor,
    payload: tl.tensor,
    answer: tl.tensor,
    tensors: tl.tensor,
    HALVES: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """answer[0]: zero where nothing changed. One program."""
    tl.store(answer, changed(table, addresses, residual, payload, tensors, HALVES, LANES))
