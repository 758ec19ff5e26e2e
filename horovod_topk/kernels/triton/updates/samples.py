# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator, no-any-return"
# ruff: noqa: N803
"""Triton kernels that add up squares over a sample of each tensor of a list.

One program works on one tensor. A sample is every so many blocks of a shard; see
`horovod_topk.ops.protocol.Ops.blocks`. Sums are float64, in an order that depends on the sample and
on Triton alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from horovod_topk.kernels.triton.updates.elements import loaded, pointers, put, quotient
from horovod_topk.ops import coding

BLOCK = tl.constexpr(coding.SHARD_BLOCK)
ROWS = tl.constexpr(8)  # blocks added at once
COLUMNS = tl.constexpr(6)  # numbers of a `Place`
OFTEN = tl.constexpr(coding.OFTEN)  # least code of elements that arrive often
STRETCH = tl.constexpr(1 << 14)  # elements multiplied at once
SMALL = tl.constexpr(1 << 22)  # elements of a tensor that one program may multiply
LARGEST = tl.constexpr(coding.LIMIT)
TINY = tl.constexpr(2.0**-100)


@triton.jit
def place(
    table: tl.tensor, t: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return where a tensor's sample is (numel, shards, first, parts), and its number of blocks."""
    row = table + t * COLUMNS
    numel, shards, first = tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)
    parts, blocks = tl.load(row + 5), (numel + BLOCK - 1) // BLOCK
    own = tl.maximum(blocks - first + shards - 1, 0) // shards
    return numel, shards, first, parts, (own + parts - 1) // parts


@triton.jit
def finite(value: tl.tensor) -> tl.tensor:
    """Replace NaN and infinities by 0, and limit others to +-LARGEST, as `Ops.finite` does."""
    is_finite = tl.abs(value) < float("inf")
    return tl.where(is_finite, tl.minimum(tl.maximum(value, -LARGEST), LARGEST), 0.0)


@triton.jit
def summed(
    table: tl.tensor,
    t: tl.tensor,
    gradients: tl.tensor,
    before: tl.tensor,
    after: tl.tensor,
    arrivals: tl.tensor,
    factor: tl.tensor,
    unit: tl.tensor,
    OF: tl.constexpr,
    KIND: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Add up energies of the elements of a tensor that arrive often, and of its others.

    arrivals: codes of all tensors, uint8.
    factor: of the gradients.
    OF: "gradients", or what error feedback takes away: of a "rank", or of the sums of an "owner",
        which are in units of `unit`, given residuals.
    """
    numel, shards, first, parts, blocks = place(table, t)
    source = pointers(gradients, t, KIND)
    own, whole = tl.load(table + t * COLUMNS), tl.load(table + t * COLUMNS + 1)
    lanes = tl.arange(0, BLOCK)[None, :]
    often, rarely = tl.zeros([ROWS, BLOCK], tl.float64), tl.zeros([ROWS, BLOCK], tl.float64)
    for begin in range(0, blocks, ROWS):
        block = ((begin + tl.arange(0, ROWS)) * parts)[:, None].to(tl.int64)
        at = (block * shards + first) * BLOCK + lanes
        inside = at < numel
        came = loaded(source + at, inside, KIND) * factor
        if OF != "gradients":
            kept = own + block * BLOCK + lanes
            e = tl.load(before + kept, mask=inside, other=0.0)
            left = tl.load(after + kept, mask=inside, other=0.0)
            if OF == "owner":
                came = (came + left - e) * unit
                e *= unit
                left *= unit
        energy = came * came
        if OF != "gradients":
            a = came + e
            is_sent = tl.abs(a - left) * 2.0 > tl.abs(a)
            energy = energy - tl.where(is_sent, a * a - left * left, 0.0)
        code = tl.load(arrivals + whole + at, mask=inside, other=0).to(tl.int32)
        often += tl.where(code >= OFTEN, energy, 0.0).to(tl.float64)
        rarely += tl.where(code >= OFTEN, 0.0, energy).to(tl.float64)
    return tl.sum(often), tl.sum(rarely)


@triton.jit
def fade(
    at: tl.tensor, now: tl.tensor, fading: tl.tensor, before: tl.tensor, after: tl.tensor
) -> tl.tensor:
    """Add a step's energy of class number `at` to the fading sum; store and return the new sum."""
    energy = finite(tl.load(fading + at) * tl.load(before + at) + now)
    tl.store(after + at, energy)
    return energy


@triton.jit
def energy_withheld(
    table: tl.tensor,
    gradients: tl.tensor,
    residual: tl.tensor,
    candidate: tl.tensor,
    arrivals: tl.tensor,
    scales: tl.tensor,
    fading: tl.tensor,
    before: tl.tensor,
    after: tl.tensor,
    KIND: tl.constexpr,
) -> None:
    """Compute each tensor's D' of both classes, once gradients are encoded: `TrackerKernels`."""
    t = tl.program_id(0)
    often, rarely = summed(
        table, t, gradients, residual, candidate, arrivals, 1.0, 1.0, "rank", KIND
    )
    scale = tl.load(scales + t)
    fade(2 * t, often.to(tl.float32) * scale, fading, before, after)
    fade(2 * t + 1, rarely.to(tl.float32) * scale, fading, before, after)


@triton.jit
def energy_of_owner(
    table: tl.tensor,
    gradients: tl.tensor,
    residual: tl.tensor,
    candidate: tl.tensor,
    arrivals: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    factor: tl.tensor,
    unit: tl.tensor,
    KIND: tl.constexpr,
) -> None:
    """Add to each tensor's D' what an owner's error feedback takes away: `TrackerKernels`."""
    t = tl.program_id(0)
    often, rarely = summed(
        table, t, gradients, residual, candidate, arrivals, factor, unit, "owner", KIND
    )
    mine, scale = out + 2 * t, tl.load(scales + t)
    tl.store(mine, finite(tl.load(mine) + often.to(tl.float32) * scale))
    tl.store(mine + 1, finite(tl.load(mine + 1) + rarely.to(tl.float32) * scale))


@triton.jit
def settle(
    at: tl.tensor,
    now: tl.tensor,
    fading: tl.tensor,
    before: tl.tensor,
    after: tl.tensor,
    sent: tl.tensor,
    width: tl.tensor,
    ranks: tl.tensor,
    gains: tl.tensor,
    damping: tl.tensor,
    by_ranks: tl.tensor,
    unit: tl.tensor,
    least: tl.tensor,
) -> None:
    """Store E' and c of class number `at`, given its energy in this step."""
    energy = fade(at, now, fading, before, after)
    less = tl.zeros([], tl.float32)
    for rank in range(ranks):
        less += tl.load(sent + rank * width + at)
    less *= unit
    over = (tl.abs(less) - less) * by_ranks
    over = tl.minimum(over, energy * tl.load(gains + at))
    less = (less + tl.abs(less)) * 0.5 - over
    whole = energy + less
    share = tl.where(whole != 0.0, quotient(less, tl.where(whole != 0.0, whole, 1.0)), 0.0)
    tl.store(damping + at, tl.math.sqrt_rn(finite(share) * least + 1.0))


@triton.jit
def energies(
    table: tl.tensor,
    gradients: tl.tensor,
    arrivals: tl.tensor,
    scales: tl.tensor,
    fading: tl.tensor,
    before: tl.tensor,
    after: tl.tensor,
    sent: tl.tensor,
    gains: tl.tensor,
    damping: tl.tensor,
    width: tl.tensor,
    ranks: tl.tensor,
    factor: tl.tensor,
    by_ranks: tl.tensor,
    unit: tl.tensor,
    least: tl.tensor,
    KIND: tl.constexpr,
) -> None:
    """Compute each tensor's E' and c of both classes, after the exchange: `TrackerKernels`.

    told: D' of each of `ranks` payloads, every `width` numbers; factor: of gradients; by_ranks: 1 /
    2R; unit: 1 / ranks; least: the least c^2, less 1.
    """
    t = tl.program_id(0)
    often, rarely = summed(
        table, t, gradients, scales, scales, arrivals, factor, 1.0, "gradients", KIND
    )
    scale = tl.load(scales + t)
    one, other = often.to(tl.float32) * scale, rarely.to(tl.float32) * scale
    settle(
        2 * t, one, fading, before, after, sent, width, ranks, gains, damping, by_ranks, unit, least
    )
    settle(
        2 * t + 1, other, fading, before, after, sent, width, ranks, gains, damping, by_ranks, unit,
        least,
    )  # fmt: skip


@triton.jit
def squares(
    table: tl.tensor, t: tl.tensor, arrays: tl.tensor, KIND: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Add up squares of a tensor's sample, and return their sum and the sample's size."""
    numel, shards, first, parts, blocks = place(table, t)
    source = pointers(arrays, t, KIND)
    total = tl.zeros([ROWS, BLOCK], tl.float64)
    for begin in range(0, blocks, ROWS):
        block = ((begin + tl.arange(0, ROWS)) * parts)[:, None].to(tl.int64)
        at = (block * shards + first) * BLOCK + tl.arange(0, BLOCK)[None, :]
        each = loaded(source + at, at < numel, KIND)
        total += (each * each).to(tl.float64)
    end = ((blocks - 1) * parts * shards + first + 1) * BLOCK  # of its last block, if that is whole
    return tl.sum(total), blocks * BLOCK - tl.maximum(end - numel, 0)


@triton.jit
def rms(table: tl.tensor, arrays: tl.tensor, out: tl.tensor, KIND: tl.constexpr) -> None:
    """Store the root of the mean square of each tensor's sample."""
    t = tl.program_id(0)
    total, count = squares(table, t, arrays, KIND)
    tl.store(out + t, tl.math.sqrt_rn(quotient(total.to(tl.float32), count.to(tl.float32))))


@triton.jit
def spikes(
    table: tl.tensor,
    gradients: tl.tensor,
    scales: tl.tensor,
    before: tl.tensor,
    after: tl.tensor,
    damping: tl.tensor,
    ungain: tl.tensor,
    slowly: tl.tensor,
    spike: tl.tensor,
    KIND: tl.constexpr,
) -> None:
    """Compute each tensor's mean norm, and limit a sudden norm by a factor: `TrackerKernels`.

    Larger tensors than `SMALL` are left to `limit`, which has many programs for each.

    ungain: factor of norms; slowly: weight of the present step, less 1.
    """
    t = tl.program_id(0)
    total, _ = squares(table, t, gradients, KIND)
    scaled = total.to(tl.float32) * tl.load(scales + t)
    norm = tl.math.sqrt_rn(finite(scaled)) * ungain
    mean = tl.load(before + t)
    is_known, counts = mean > 0.0, norm > 0.0
    rate = tl.where(is_known, slowly + 1.0, 1.0)
    now = mean + tl.where(counts, (norm - mean) * rate, 0.0)
    tl.store(after + t, finite(now))
    allowed = finite(tl.where(counts, quotient(mean * spike, tl.where(counts, norm, 1.0)), 0.0))
    factor = tl.where(is_known & counts & (allowed < 1.0), (allowed - 1.0) + 1.0, 1.0)
    factor = tl.where(is_known & (scaled > LARGEST), TINY, factor)
    tl.store(damping + t, factor)
    numel = tl.load(table + t * COLUMNS + 2)
    if (factor < 1.0) & (numel <= SMALL):
        source = pointers(gradients, t, KIND)
        for begin in range(0, numel, STRETCH):
            at = begin + tl.arange(0, STRETCH)
            put(source + at, loaded(source + at, at < numel, KIND) * factor, at < numel, KIND)
