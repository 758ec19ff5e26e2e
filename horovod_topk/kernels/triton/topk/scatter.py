# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator, no-any-return"
# ruff: noqa: N803
"""Third pass of an encode: the exact threshold, and the indices, one program for each run.

Indices go to scratch memory, from which the next pass writes them in the payload's format.

Every program of a tensor computes the same threshold, and how many entries earlier runs send; so no
program waits for another. If the bracket does not have the threshold, or more keys were in it than
could be stored, programs search the whole tensor.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr, tensor

from horovod_topk.kernels.triton.topk.index_coding import clear
from horovod_topk.kernels.triton.topk.narrow import BETWEEN, BOTTOM, COUNTS, TOP
from horovod_topk.kernels.triton.topk.numbers import (
    ABOVE,
    BRACKET,
    CARRIED,
    HALF,
    INFINITY,
    NOWHERE,
    SAMPLED,
    field,
    magnitude,
    number,
)

ROWS = tl.constexpr(256)  # runs whose counts are added at once


@triton.jit
def totals(
    counts: tensor, runs: tensor, place: tensor, COLUMN: constexpr
) -> tuple[tensor, tensor, tensor]:
    """One count of a tensor's runs: (sum of all, sum of those before `place`, largest)."""
    both, before, most = (
        tl.zeros([ROWS], tl.int32), tl.zeros([ROWS], tl.int32), tl.zeros([ROWS], tl.int32),
    )  # fmt: skip
    for at in range(0, runs, ROWS):
        row = at + tl.arange(0, ROWS)
        count = tl.load(counts + row * COUNTS + COLUMN, mask=row < runs, other=0)
        both += count
        before += tl.where(row < place, count, 0)
        most = tl.maximum(most, count)
    return tl.sum(both, 0), tl.sum(before, 0), tl.max(most, 0)


@triton.jit
def keys_at(lanes: tensor, keys: tl.tuple, ROOM: constexpr) -> tensor:
    """Keys to search: stored keys, 2**shift for each run, or those of all elements if shift < 0."""
    size, shift, aside, elements = keys
    if shift >= 0:
        width = tl.maximum(shift, 0)
        place = (lanes >> width).to(tl.int64) * ROOM + (lanes & ((1 << width) - 1))
        found = tl.load(aside + place, mask=lanes < size, other=0)
    else:
        a = tl.load(elements + lanes, mask=lanes < size, other=0.0)
        found = tl.where(lanes < size, magnitude(a), -1)
    return found


@triton.jit
def search(
    rank: tensor,
    low: tensor,
    high: tensor,
    limit: tensor,
    keys: tl.tuple,
    ROOM: constexpr,
    LANES: constexpr,
) -> tuple[tensor, tensor, tensor, tensor]:
    """The rank-th largest key, known to be in [low, high): two bits of it in each iteration.

    Returns the key, how many keys exceed it, how many of these are before lane `limit`, and how
    many equal keys are. keys: see `keys_at`.
    """
    size = keys[0]
    while high - low > 1:
        step = tl.maximum((high - low) >> 2, 1)
        one, two, three = low + step, low + 2 * step, low + 3 * step
        ones, twos, threes = (
            tl.zeros([LANES], tl.int32), tl.zeros([LANES], tl.int32), tl.zeros([LANES], tl.int32),
        )  # fmt: skip
        for at in range(0, size, LANES):
            lanes = at + tl.arange(0, LANES)
            key = keys_at(lanes, keys, ROOM)
            ones += (key >= one).to(tl.int32)
            twos += (key >= two).to(tl.int32)
            threes += (key >= three).to(tl.int32)
        by_one = tl.sum(ones, 0) >= rank
        by_two = tl.sum(twos, 0) >= rank
        by_three = tl.sum(threes, 0) >= rank
        low = tl.where(by_three, three, tl.where(by_two, two, tl.where(by_one, one, low)))
        end = tl.where(by_two, tl.where(by_three, high, three), tl.where(by_one, two, one))
        high = tl.minimum(high, end)
    more, more_before, same_before = (
        tl.zeros([LANES], tl.int32), tl.zeros([LANES], tl.int32), tl.zeros([LANES], tl.int32),
    )  # fmt: skip
    for at in range(0, size, LANES):
        lanes = at + tl.arange(0, LANES)
        key = keys_at(lanes, keys, ROOM)
        more += (key > low).to(tl.int32)
        more_before += ((key > low) & (lanes < limit)).to(tl.int32)
        same_before += ((key == low) & (lanes < limit)).to(tl.int32)
    return low, tl.sum(more, 0), tl.sum(more_before, 0), tl.sum(same_before, 0)


@triton.jit
def decide(
    table: tensor,
    t: tensor,
    place: tensor,
    brackets: tensor,
    counts: tensor,
    asides: tensor,
    elements: tensor,
    RUN: constexpr,
    ROOM: constexpr,
    LANES: constexpr,
) -> tuple[tensor, tensor, tensor, tensor, tensor]:
    """Which elements are sent: keys above a threshold, and the first other candidates up to k.

    Returns the threshold, the least key of other candidates (the threshold itself for exact
    selection), how many keys exceed the threshold, and how many of these and of the other
    candidates are in the runs before `place`.
    """
    k, numel, run0 = number(table, t, "k"), number(table, t, "numel"), number(table, t, "run0")
    runs = number(table, t, "runs")
    bottom, top = tl.load(brackets + t * 2), tl.load(brackets + t * 2 + 1)
    mine = counts + run0 * COUNTS
    above, above_before, _ = totals(mine, runs, place, ABOVE)
    at_top, top_before, _ = totals(mine, runs, place, TOP)
    between, between_before, most = totals(mine, runs, place, BETWEEN)
    at_bottom, bottom_before, _ = totals(mine, runs, place, BOTTOM)
    with_top, with_all = above + at_top, above + at_top + between + at_bottom
    if (number(table, t, "rule") == SAMPLED) & (2 * with_all >= k) & (with_all <= k):
        threshold, least, more = bottom - 1, 0, with_all
        more_before = above_before + top_before + between_before + bottom_before
        same_before = place * RUN - more_before
    elif (above < k) & (k <= with_top):
        threshold, least, more = top, top, above
        more_before, same_before = above_before, top_before
    elif (with_top + between < k) & (k <= with_all):
        threshold, least, more = bottom, bottom, with_top + between
        more_before = above_before + top_before + between_before
        same_before = bottom_before
    else:
        low, high = 0, INFINITY + 1
        rank, size, limit, shift = k, numel, place * RUN, -1
        exceeding, exceeding_before = 0, 0
        if k <= above:
            low = top + 1
        elif k > with_all:
            high = bottom
        else:
            low, high = bottom + 1, top
            if most <= ROOM:
                shift = 0
                while (1 << shift) < most:
                    shift += 1
                rank, size, limit = k - with_top, runs << shift, place << shift
                exceeding, exceeding_before = with_top, above_before + top_before
        keys = size, shift, asides + run0.to(tl.int64) * ROOM, elements
        threshold, more, more_before, same_before = search(
            rank, low, high, limit, keys, ROOM, LANES
        )
        least = threshold
        more += exceeding
        more_before += exceeding_before
    return threshold, least, more, more_before, same_before


@triton.jit
def send_tile(
    a: tensor,
    indices: tensor,
    at: tensor,
    last: tensor,
    cut: tl.tuple,
    counts: tl.tuple,
    LANES: constexpr,
) -> tuple[tensor, tensor]:
    """Write the indices of a tile's entries.

    Keys above the threshold and other candidates before the tile number `more` and `same`. Returns
    both counts with the tile's own added.
    """
    threshold, least, quota = cut
    more, same = counts
    lanes = at + tl.arange(0, LANES)
    key = tl.where(lanes < last, magnitude(a), -2)
    sure = key > threshold
    other = (key <= threshold) & (key >= least)
    both = sure.to(tl.int32) + (other.to(tl.int32) << 16)
    before = tl.cumsum(both, 0) - both
    others = same + (before >> 16)
    place = more + (before & HALF) + tl.minimum(others, quota)
    sent = sure | (other & (others < quota))
    tl.store(indices + place, lanes, mask=sent)
    total = tl.sum(both, 0)
    return more + (total & HALF), same + (total >> 16)


@triton.jit
def send_run(
    products: tensor,
    start: tensor,
    indices: tensor,
    first: tensor,
    last: tensor,
    cut: tl.tuple,
    counts: tl.tuple,
    LANES: constexpr,
) -> None:
    """Write indices among elements [first, last): whole tiles by wide, prefetched loads."""
    lanes, whole, mine = tl.arange(0, LANES), first, products + start
    more, same = counts
    if start % 4 == 0:
        whole = first + (last - first) // LANES * LANES
    if whole > first:
        wide = products + tl.multiple_of(start, 4) + lanes
        a = tl.load(wide + tl.multiple_of(first, LANES))
        for at in range(first, whole, LANES):
            following = tl.minimum(at + LANES, whole - LANES)
            coming = tl.load(wide + tl.multiple_of(following, LANES))
            more, same = send_tile(a, indices, at, last, cut, (more, same), LANES)
            a = coming
    for at in range(whole, last, LANES):
        a = tl.load(mine + at + lanes, mask=at + lanes < last, other=0.0)
        more, same = send_tile(a, indices, at, last, cut, (more, same), LANES)


@triton.jit
def scatter(
    table: tensor,
    run_owners: tensor,
    carried: tensor,
    products: tensor,
    payload: tensor,
    brackets: tensor,
    counts: tensor,
    asides: tensor,
    indices: tensor,
    RUN: constexpr,
    ROOM: constexpr,
    LANES: constexpr,
) -> None:
    """Write the indices of one run. The first run of a tensor stores the next step's bracket."""
    run = tl.program_id(0)
    t = tl.load(run_owners + run)
    start, place = number(table, t, "start"), run - number(table, t, "run0")
    threshold, least, more, more_before, same_before = decide(
        table, t, place, brackets, counts, asides, products + start, RUN, ROOM, LANES
    )
    if (place == 0) & (number(table, t, "rule") == CARRIED) & (threshold < INFINITY):
        around = tl.maximum(threshold - BRACKET // 2, 1)
        tl.store(carried + t, tl.where(threshold > 0, around, NOWHERE))
    first = place * RUN
    last = tl.minimum(first + RUN, number(table, t, "numel"))
    clear(payload, table, t, place, LANES)
    cut, counts = (threshold, least, number(table, t, "k") - more), (more_before, same_before)
    mine = indices + field(table, t, "entry0")
    send_run(products, start, mine, first, last, cut, counts, LANES)
