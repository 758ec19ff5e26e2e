# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator, no-any-return"
# ruff: noqa: N803
"""Triton kernels that read or write each element of a list of tensors, in one launch for all.

Every operation is rounded as in `horovod_topk.kernels.cpu`, so that results have the same bits.
KIND is the dtype of all tensors of a list, as in a recipe. 16-bit floats are computed with in
float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from horovod_topk.kernels.triton.topk.formats import bfloat16_bits
from horovod_topk.kernels.triton.topk.numbers import in_gradient
from horovod_topk.ops import coding

BLOCK = tl.constexpr(2048)  # elements of one program, which are of one tensor
COLUMNS = tl.constexpr(2)  # of a list's table: a tensor's elements, its first block
ROW = tl.constexpr(9)  # of an update's table: see `adam`
NUMBERS = tl.constexpr(14)  # of a set: see `horovod_topk.kernels.triton.updates.lists.update`
CODES = tl.constexpr(coding.ALWAYS + 1)  # number of codes
SHARE = tl.constexpr(1.0 / coding.ALWAYS)  # phi^(1/4) of the code 1
OFTEN = tl.constexpr(coding.OFTEN)
FREE = tl.constexpr(coding.FREE)
NOISE = tl.constexpr(coding.NOISE)


@triton.jit
def spot(table: tl.tensor, owners: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return a program's tensor, its first element, the others relative to that, and a mask."""
    t = tl.load(owners + tl.program_id(0))
    row, lanes = table + t * COLUMNS, tl.arange(0, BLOCK)
    first = (tl.program_id(0) - tl.load(row + 1)) * BLOCK
    return t, first, lanes, lanes < tl.load(row) - first


@triton.jit
def pointers(addresses: tl.tensor, t: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """Return a pointer to the first element of tensor `t`; of bfloat16 to its bits."""
    address = tl.load(addresses + t)
    if KIND == 0:
        found = address.to(tl.pointer_type(tl.float16))
    elif KIND == 1:
        found = address.to(tl.pointer_type(tl.int16))
    else:
        found = address.to(tl.pointer_type(tl.float32))
    return found


@triton.jit
def loaded(places: tl.tensor, inside: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """Load elements as float32; 0 where not `inside`."""
    found = tl.load(places, mask=inside, other=0)
    if KIND == 1:
        wide = (found.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = found.to(tl.float32)
    return wide


@triton.jit
def put(places: tl.tensor, values: tl.tensor, inside: tl.tensor, KIND: tl.constexpr) -> None:
    """Store float32 values, rounded to the nearest number."""
    if KIND == 0:
        tl.store(places, values.to(tl.float16), mask=inside)
    elif KIND == 1:
        tl.store(places, bfloat16_bits(values).to(tl.int16), mask=inside)
    else:
        tl.store(places, values, mask=inside)


@triton.jit
def put_at_random(
    places: tl.tensor, values: tl.tensor, at: tl.tensor, step: tl.tensor, inside: tl.tensor
) -> None:
    """Store float32 values as bfloat16, rounded at random: `horovod_topk.ops.coding.noise`."""
    x = at.to(tl.uint32) * NOISE[0] + step.to(tl.uint32) * NOISE[1]
    x = (x ^ (x >> 16)) * NOISE[2]
    x = (x ^ (x >> 13)) * NOISE[3]
    bits = values.to(tl.int32, bitcast=True)
    noisy = (bits + ((x ^ (x >> 16)) & 0xFFFF).to(tl.int32)) >> 16
    tl.store(places, tl.where(values == values, noisy, 0x7FC0).to(tl.int16), mask=inside)


@triton.jit
def quotient(one: tl.tensor, other: tl.tensor) -> tl.tensor:
    """Divide, correctly rounded, by a tensor of the same shape."""
    return tl.math.div_rn(one, other)


@triton.jit
def limit(
    table: tl.tensor,
    owners: tl.tensor,
    arrays: tl.tensor,
    damping: tl.tensor,
    KIND: tl.constexpr,
) -> None:
    """Multiply each tensor by its factor, if that is less than 1."""
    t, first, lanes, inside = spot(table, owners)
    factor = tl.load(damping + t)
    if factor < 1.0:
        place = pointers(arrays, t, KIND) + first + lanes
        put(place, loaded(place, inside, KIND) * factor, inside, KIND)


@triton.jit
def shards(
    table: tl.tensor,
    owners: tl.tensor,
    rows: tl.tensor,
    parts: tl.tensor,
    KIND: tl.constexpr,
) -> None:
    """Copy a shard of each tensor, as float32.

    rows: of each tensor, its address, that of its shard, and the shard's first block.
    """
    t, first, lanes, inside = spot(table, owners)
    row = rows + t * 3
    source = pointers(row, 0, KIND) + in_gradient(first + lanes, (parts, tl.load(row + 2)))
    put(pointers(row, 1, 2) + first + lanes, loaded(source, inside, KIND), inside, 2)


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
    row: tl.tensor,
    own: tl.tensor,
    first: tl.tensor,
    lanes: tl.tensor,
    inside: tl.tensor,
    KIND: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return a weight, the gradient that its optimizer adds, and whether a gradient has arrived."""
    weight = loaded(pointers(row, 1, KIND) + first + lanes, inside, KIND)
    gradient = loaded(pointers(row, 2, KIND) + first + lanes, inside, KIND)
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
    table: tl.tensor,
    owners: tl.tensor,
    rows: tl.tensor,
    sets: tl.tensor,
    later: tl.tensor,
    KIND: tl.constexpr,
) -> None:
    """Update weights and momentum buffers, as `sgd` of `horovod_topk.updates.formulas`.

    rows: as of `adam`; a momentum buffer is the first moment, and there are no more but the codes.
    """
    t, first, lanes, inside = spot(table, owners)
    row = rows + t * ROW
    own = numbers(sets, row)
    weight, g, arrives = gradient_as_added(row, own, first, lanes, inside, KIND)
    _, share = codes_of(row, first, lanes, inside, arrives, later)
    momentum, rate, cut = number(own, 2), number(own, 3), number(own, 5)
    buffer = pointers(row, 3, KIND) + first + lanes
    phi = share * share * (share * share)
    total = loaded(buffer, inside, KIND) * momentum + (1.0 - phi * cut) * g
    step = (1.0 - share * momentum) * number(own, 6) * total
    step = tl.where(number(own, 4) != 0.0, g + step * momentum, step)
    put(pointers(row, 1, KIND) + first + lanes, weight - step * rate, inside, KIND)
    put(buffer, share * total, inside, KIND)


@triton.jit
def farthest(rms: tl.tensor, reach: tl.tensor) -> tl.tensor:
    """Return the largest step of a weight in learning rates, as `far` of the formulas."""
    reach = rms * reach
    reach = tl.where(reach < 1.0, 1.0, reach)
    return tl.where(reach < FREE, reach, FREE)


@triton.jit
def factors_of(row: tl.tensor, before: tl.tensor, beta: tl.tensor) -> tl.tensor:
    """Return the factor c of each element's class; 1 in Adam's first step, where `beta` is 0."""
    damping = pointers(row, 7, 2)
    c = tl.where(before >= OFTEN, tl.load(damping), tl.load(damping + 1))
    return tl.where(beta != 0.0, c, 1.0)


@triton.jit
def adam(
    table: tl.tensor,
    owners: tl.tensor,
    rows: tl.tensor,
    sets: tl.tensor,
    later: tl.tensor,
    KIND: tl.constexpr,
) -> None:
    """Update weights and moments, as `adam` of `horovod_topk.updates.formulas`.

    rows: of each tensor, its set of numbers, and addresses of its weight, gradient, first and
        second moment, largest second moment or 0, codes, factors of both classes, and rms.
    """
    t, first, lanes, inside = spot(table, owners)
    row = rows + t * ROW
    own = numbers(sets, row)
    weight, g, arrives = gradient_as_added(row, own, first, lanes, inside, KIND)
    before, share = codes_of(row, first, lanes, inside, arrives, later)
    beta, now = number(own, 2), number(own, 5)
    mean, square = pointers(row, 3, KIND) + first + lanes, pointers(row, 4, KIND) + first + lanes
    v = loaded(square, inside, KIND) * number(own, 3) + g * g * number(own, 12)
    if KIND == 1:
        put_at_random(square, v, first + lanes, number(own, 13).to(tl.int32), inside)
    else:
        put(square, v, inside, KIND)
    root = tl.math.sqrt_rn(v)
    b, factor = share * share * beta, factors_of(row, before, beta)
    moment = loaded(mean, inside, KIND)
    moment = b * number(own, 4) * moment + (1.0 - b) * (factor * now) * g
    limits = root * (farthest(tl.load(pointers(row, 8, 2)), number(own, 11)) * number(own, 10))
    moment = tl.where(moment > limits, limits, moment)
    moment = tl.where(moment < -limits, -limits, moment)
    put(mean, moment, inside, KIND)
    if tl.load(row + 5) != 0:
        largest = pointers(row, 5, KIND) + first + lanes
        most = loaded(largest, inside, KIND)
        most = tl.where(most > v, most, v)
        put(largest, most, inside, KIND)
        root = tl.math.sqrt_rn(most)
    step = quotient(moment, root * number(own, 8) + number(own, 9)) * number(own, 7)
    put(pointers(row, 1, KIND) + first + lanes, weight * number(own, 6) - step, inside, KIND)
