# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator, no-any-return"
"""Triton kernels that read or write each element of a list of tensors, in one launch for all.

Every operation is rounded as in `horovod_topk.kernels.cpu`, so that results have the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from horovod_topk.ops import coding

BLOCK = tl.constexpr(2048)  # elements of one program, which are of one tensor
COLUMNS = tl.constexpr(2)  # of a list's table: a tensor's elements, its first block
ROW = tl.constexpr(9)  # of an update's table: see `adam`
NUMBERS = tl.constexpr(13)  # of a set: see `horovod_topk.kernels.triton.updates.lists.update`
CODES = tl.constexpr(coding.ALWAYS + 1)  # number of codes
SHARE = tl.constexpr(1.0 / coding.ALWAYS)  # phi^(1/4) of the code 1
OFTEN = tl.constexpr(coding.OFTEN)
FREE = tl.constexpr(coding.FREE)


@triton.jit
def spot(table: tl.tensor, owners: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return a program's tensor, its first element, the others relative to that, and a mask."""
    t = tl.load(owners + tl.program_id(0))
    row, lanes = table + t * COLUMNS, tl.arange(0, BLOCK)
    first = (tl.program_id(0) - tl.load(row + 1)) * BLOCK
    return t, first, lanes, lanes < tl.load(row) - first


@triton.jit
def pointers(addresses: tl.tensor, t: tl.tensor) -> tl.tensor:
    """Return a pointer to the first element of tensor `t`, float32."""
    return tl.load(addresses + t).to(tl.pointer_type(tl.float32))


@triton.jit
def quotient(one: tl.tensor, other: tl.tensor) -> tl.tensor:
    """Divide, correctly rounded, by a tensor of the same shape."""
    return tl.math.div_rn(one, other)


@triton.jit
def limit(table: tl.tensor, owners: tl.tensor, arrays: tl.tensor, damping: tl.tensor) -> None:
    """Multiply each tensor by its factor, if that is less than 1."""
    t, first, lanes, inside = spot(table, owners)
    factor = tl.load(damping + t)
    if factor < 1.0:
        place = pointers(arrays, t) + first + lanes
        tl.store(place, tl.load(place, mask=inside, other=0.0) * factor, mask=inside)


@triton.jit
def numbers(sets: tl.tensor, row: tl.tensor) -> tl.tensor:
    """Return a pointer to a tensor's numbers, bits of float32. A row begins with their position."""
    return sets + tl.load(row) * NUMBERS


@triton.jit
def number(own: tl.tensor, position: tl.constexpr) -> tl.tensor:
    """Return one of a tensor's numbers."""
    return tl.load(own + position).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def gradient_as_added(
    row: tl.tensor, own: tl.tensor, first: tl.tensor, lanes: tl.tensor, inside: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return a weight, the gradient that its optimizer adds, and whether a gradient has arrived."""
    weight = tl.load(pointers(row, 1) + first + lanes, mask=inside, other=0.0)
    gradient = tl.load(pointers(row, 2) + first + lanes, mask=inside, other=0.0)
    sign, decay = number(own, 0), number(own, 1)
    g = gradient * sign
    return weight, tl.where(decay != 0.0, g + weight * decay, g), gradient != 0.0


@triton.jit
def codes_of(
    row: tl.tensor,
    first: tl.tensor,
    lanes: tl.tensor,
    inside: tl.tensor,
    arrives: tl.tensor,
    later: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """Return codes before a step, and phi^(1/4) after it, and write the codes after it.

    later: `horovod_topk.updates.formulas.AFTER`, uint8.
    """
    place = tl.load(row + 6).to(tl.pointer_type(tl.uint8)) + first + lanes
    before = tl.load(place, mask=inside, other=0).to(tl.int32)
    after = tl.load(later + tl.where(arrives, CODES + before, before), mask=inside, other=0)
    tl.store(place, after, mask=inside)
    return before, after.to(tl.float32) * SHARE


@triton.jit
def sgd(
    table: tl.tensor, owners: tl.tensor, rows: tl.tensor, sets: tl.tensor, later: tl.tensor
) -> None:
    """Update weights and momentum buffers, as `sgd` of `horovod_topk.updates.formulas`.

    rows: as of `adam`; a momentum buffer is the first moment, and there are no more but the codes.
    """
    t, first, lanes, inside = spot(table, owners)
    row = rows + t * ROW
    own = numbers(sets, row)
    weight, g, arrives = gradient_as_added(row, own, first, lanes, inside)
    _, share = codes_of(row, first, lanes, inside, arrives, later)
    momentum, rate, cut = number(own, 2), number(own, 3), number(own, 5)
    buffer = pointers(row, 3) + first + lanes
    phi = share * share * (share * share)
    total = tl.load(buffer, mask=inside, other=0.0) * momentum + (1.0 - phi * cut) * g
    step = (1.0 - share * momentum) * number(own, 6) * total
    step = tl.where(number(own, 4) != 0.0, g + step * momentum, step)
    tl.store(pointers(row, 1) + first + lanes, weight - step * rate, mask=inside)
    tl.store(buffer, share * total, mask=inside)


@triton.jit
def farthest(rms: tl.tensor, reach: tl.tensor) -> tl.tensor:
    """Return the largest step of a weight in learning rates, as `far` of the formulas."""
    reach = rms * reach
    reach = tl.where(reach < 1.0, 1.0, reach)
    return tl.where(reach < FREE, reach, FREE)


@triton.jit
def factors_of(row: tl.tensor, before: tl.tensor, beta: tl.tensor) -> tl.tensor:
    """Return the factor c of each element's class; 1 in Adam's first step, where `beta` is 0."""
    damping = pointers(row, 7)
    c = tl.where(before >= OFTEN, tl.load(damping), tl.load(damping + 1))
    return tl.where(beta != 0.0, c, 1.0)


@triton.jit
def adam(
    table: tl.tensor, owners: tl.tensor, rows: tl.tensor, sets: tl.tensor, later: tl.tensor
) -> None:
    """Update weights and moments, as `adam` of `horovod_topk.updates.formulas`.

    rows: of each tensor, its set of numbers, and addresses of its weight, gradient, first and
        second moment, largest second moment or 0, codes, factors of both classes, and rms.
    """
    t, first, lanes, inside = spot(table, owners)
    row = rows + t * ROW
    own = numbers(sets, row)
    weight, g, arrives = gradient_as_added(row, own, first, lanes, inside)
    before, share = codes_of(row, first, lanes, inside, arrives, later)
    beta, now = number(own, 2), number(own, 5)
    mean, square = pointers(row, 3) + first + lanes, pointers(row, 4) + first + lanes
    v = tl.load(square, mask=inside, other=0.0) * number(own, 3) + g * g * number(own, 12)
    tl.store(square, v, mask=inside)
    root = tl.math.sqrt_rn(v)
    b, factor = share * share * beta, factors_of(row, before, beta)
    moment = tl.load(mean, mask=inside, other=0.0)
    moment = b * number(own, 4) * moment + (1.0 - b) * (factor * now) * g
    limits = root * (farthest(tl.load(pointers(row, 8)), number(own, 11)) * number(own, 10))
    moment = tl.where(moment > limits, limits, moment)
    moment = tl.where(moment < -limits, -limits, moment)
    tl.store(mean, moment, mask=inside)
    if tl.load(row + 5) != 0:
        largest = pointers(row, 5) + first + lanes
        most = tl.load(largest, mask=inside, other=0.0)
        most = tl.where(most > v, most, v)
        tl.store(largest, most, mask=inside)
        root = tl.math.sqrt_rn(most)
    step = quotient(moment, root * number(own, 8) + number(own, 9)) * number(own, 7)
    tl.store(pointers(row, 1) + first + lanes, weight * number(own, 6) - step, mask=inside)
