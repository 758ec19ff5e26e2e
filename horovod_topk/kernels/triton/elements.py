# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator, no-any-return"
# ruff: noqa: N803
"""Triton kernels that read or write each element of a list of tensors, in one launch for all.

Every operation is rounded as in `horovod_topk.kernels.cpu`, so that results have the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = tl.constexpr(2048)  # elements of one program, which are of one tensor
COLUMNS = tl.constexpr(3)  # of a list's table: a tensor's elements, its first one, its first block


@triton.jit
def spot(table: tl.tensor, owners: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return a program's tensor, where its elements are in it and in a flat array, and a mask."""
    t = tl.load(owners + tl.program_id(0))
    row = table + t * COLUMNS
    first = (tl.program_id(0) - tl.load(row + 2)) * BLOCK
    at = first + tl.arange(0, BLOCK)
    return t, at, tl.load(row + 1) + at, at < tl.load(row)


@triton.jit
def pointers(addresses: tl.tensor, t: tl.tensor) -> tl.tensor:
    """Return a pointer to the first element of tensor `t`, float32."""
    return tl.load(addresses + t).to(tl.pointer_type(tl.float32))


@triton.jit
def quotient(one: tl.tensor, other: tl.tensor) -> tl.tensor:
    """Divide, correctly rounded, by a tensor of the same shape."""
    return tl.math.div_rn(one, other)


@triton.jit
def share(arrivals: tl.tensor, momentum: tl.tensor) -> tl.tensor:
    """Return momentum * phi^(1/4)."""
    return tl.math.sqrt_rn(tl.math.sqrt_rn(arrivals)) * momentum


@triton.jit
def follow(
    table: tl.tensor,
    owners: tl.tensor,
    gradients: tl.tensor,
    mean: tl.tensor,
    out: tl.tensor,
    kept: tl.tensor,
    rate: tl.tensor,
) -> None:
    """Set `out` to kept * mean, plus `rate` where a gradient is not 0. The two arrays are flat."""
    t, at, place, inside = spot(table, owners)
    g = tl.load(pointers(gradients, t) + at, mask=inside, other=0.0)
    faded = tl.load(mean + place, mask=inside, other=0.0) * kept
    tl.store(out + place, faded + tl.where(g != 0.0, rate, 0.0), mask=inside)


@triton.jit
def limit(table: tl.tensor, owners: tl.tensor, arrays: tl.tensor, factors: tl.tensor) -> None:
    """Multiply each tensor by its factor, if that is less than 1."""
    t, at, _, inside = spot(table, owners)
    factor = tl.load(factors + t)
    if factor < 1.0:
        place = pointers(arrays, t) + at
        tl.store(place, tl.load(place, mask=inside, other=0.0) * factor, mask=inside)


@triton.jit
def prepare_buffer(
    table: tl.tensor,
    owners: tl.tensor,
    buffers: tl.tensor,
    added: tl.tensor,
    parameters: tl.tensor,
    arrivals: tl.tensor,
    losses: tl.tensor,
    momentum: tl.tensor,
    left: tl.tensor,
    decay: tl.tensor,
    DECAYS: tl.constexpr,
) -> None:
    """Prepare SGD's momentum buffers, as `topkef_prepare_buffer` of kernels/cpu/topkef.h.

    losses: bits of float32, int64.
    """
    t, at, _, inside = spot(table, owners)
    loss = tl.load(losses + t).to(tl.int32).to(tl.float32, bitcast=True)
    phi = tl.load(pointers(arrivals, t) + at, mask=inside, other=0.0)
    g = tl.load(pointers(added, t) + at, mask=inside, other=0.0)
    if DECAYS:
        g = g + tl.load(pointers(parameters, t) + at, mask=inside, other=0.0) * decay
    buffer = pointers(buffers, t) + at
    summed = tl.load(buffer, mask=inside, other=0.0) * momentum + (1.0 - phi * loss) * g
    factor = quotient(1.0 - share(phi, momentum), tl.full([BLOCK], left, tl.float32))
    divisor = tl.full([BLOCK], momentum, tl.float32)
    tl.store(buffer, quotient(factor * summed - g, divisor), mask=inside)


@triton.jit
def restore_buffer(
    table: tl.tensor,
    owners: tl.tensor,
    buffers: tl.tensor,
    arrivals: tl.tensor,
    momentum: tl.tensor,
    left: tl.tensor,
) -> None:
    """Restore SGD's momentum buffers, as `topkef_restore_buffer` of kernels/cpu/topkef.h.

    left: (1 - momentum) / momentum.
    """
    t, at, _, inside = spot(table, owners)
    b = share(tl.load(pointers(arrivals, t) + at, mask=inside, other=0.0), momentum)
    buffer = pointers(buffers, t) + at
    m = tl.load(buffer, mask=inside, other=0.0)
    tl.store(buffer, m * quotient(b * left, 1.0 - b), mask=inside)


@triton.jit
def prepare_moment(
    table: tl.tensor,
    owners: tl.tensor,
    moments: tl.tensor,
    added: tl.tensor,
    gradients: tl.tensor,
    arrivals: tl.tensor,
    squares: tl.tensor,
    factors: tl.tensor,
    largest: tl.tensor,
    beta: tl.tensor,
    again: tl.tensor,
    now: tl.tensor,
    later: tl.tensor,
    rate: tl.tensor,
    threshold: tl.tensor,
    beta2: tl.tensor,
    new: tl.tensor,
) -> None:
    """Prepare Adam's first moments, as `topkef_prepare_moment` of kernels/cpu/topkef.h.

    factors, largest: addresses of c of both classes, and of the largest |m'| where v is 1.
    threshold: `limit` of topkef.h.
    new: 1 - beta2.
    """
    t, at, _, inside = spot(table, owners)
    phi = tl.load(pointers(arrivals, t) + at, mask=inside, other=0.0)
    g = tl.load(pointers(added, t) + at, mask=inside, other=0.0)
    has_arrived = tl.load(pointers(gradients, t) + at, mask=inside, other=0.0) != 0.0
    is_often = phi - tl.where(has_arrived, rate, 0.0) > threshold
    c = tl.where(is_often, tl.load(pointers(factors, t)), tl.load(pointers(factors, t) + 1))
    b = tl.math.sqrt_rn(phi) * beta
    moment = pointers(moments, t) + at
    own = tl.load(moment, mask=inside, other=0.0) * (b * again)
    moved = own + (c * now * (1.0 - b)) * g
    v = tl.load(pointers(squares, t) + at, mask=inside, other=0.0) * beta2
    limits = tl.math.sqrt_rn(g * g * new + v) * tl.load(pointers(largest, t))
    moved = tl.where(moved > limits, limits, tl.where(moved < -limits, -limits, moved))
    tl.store(moment, moved - g * later, mask=inside)
