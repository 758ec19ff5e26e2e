"""Plans of exchanges with owners, for counting bytes alone, at any number of ranks.

`core.shards` lays out one payload for each owner. Here owners whose shards of every tensor are
equally large share one: blocks are dealt to owners in turns, so that a tensor's shards have three
sizes at most, and a bucket of T tensors has 3 T + 1 kinds of owners, however many ranks there are.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

from horovod_topk.core.plan import payload
from horovod_topk.core.plan.buckets import BucketPlan
from horovod_topk.core.plan.nodes import Nodes
from horovod_topk.core.plan.shards import (
    ALIGNMENT,
    NodePlan,
    ShardedPlan,
    first_block,
    size_changes,
)
from horovod_topk.methods.protocol import Piece
from horovod_topk.ops.coding import shard_numel

Sizes = tuple[int, ...]  # elements of a shard of each tensor


def shard(bucket: BucketPlan, parts: int) -> ShardedPlan:
    """`core.shards.shard`, with plans that count bytes and cannot be read or written."""
    scatter = _directed(bucket, parts, "scatter")
    return ShardedPlan(bucket, scatter, _directed(bucket, parts, "gather"))


def shard_sums(bucket: BucketPlan, nodes: Nodes) -> NodePlan:
    """`core.shards.shard_sums`, with plans that count bytes and cannot be read or written."""
    sums = _directed(bucket, nodes.owners, "sums")
    return NodePlan(bucket, sums, result=sums[0])


def _directed(bucket: BucketPlan, parts: int, direction: str) -> tuple[BucketPlan, ...]:
    """The plan of each owner's payload; the same object for owners of one kind."""
    measures = () if direction == "scatter" else bucket.measures
    body_at = payload.body_at(len(bucket.tensors), len(measures))
    pieces: dict[tuple[int, int], Piece] = {}  # by position and elements
    kinds: dict[Sizes, list[Piece]] = {}
    runs = _runs(tuple((each.spec.name, each.spec.numel) for each in bucket.tensors), parts)
    for sizes, _ in runs:
        if sizes not in kinds:
            kinds[sizes] = [_piece(bucket, direction, pieces, at, n) for at, n in enumerate(sizes)]
    config = bucket.config
    ends = [config.body_end(each, body_at) for each in kinds.values()]
    layout = payload.layout(len(bucket.tensors), max(ends), len(measures))
    common = replace(bucket, layout=layout, parts=parts, direction=direction, measures=measures)
    plans = {sizes: replace(common, tensors=_stored(each)) for sizes, each in kinds.items()}
    return tuple(itertools.chain.from_iterable([plans[sizes]] * count for sizes, count in runs))


@functools.lru_cache(maxsize=256)  # of every format of values and both directions
def _runs(tensors: tuple[tuple[str, int], ...], parts: int) -> list[tuple[Sizes, int]]:
    """Runs of owners, one after another, whose shards are equally large: sizes and their number."""
    starts = {0, parts}
    for name, numel in tensors:
        starts |= size_changes(name, numel, parts)
    return [
        (
            tuple(
                shard_numel(numel, parts, first_block(name, parts, at)) for name, numel in tensors
            ),
            end - at,
        )
        for at, end in itertools.pairwise(sorted(starts))
    ]


def _piece(
    bucket: BucketPlan,
    direction: str,
    known: dict[tuple[int, int], Piece],
    position: int,
    numel: int,
) -> Piece:
    """A piece of so many elements; its first block is not that of its owner."""
    if (position, numel) not in known:
        part = Piece(bucket.tensors[position].spec, numel, position)
        known[position, numel] = bucket.config.piece(part, direction)
    return known[position, numel]


def _stored(pieces: list[Piece]) -> tuple[Piece, ...]:
    """The pieces, of which the last one begins where it does in the arenas."""
    *others, last = pieces
    start = sum(-(-piece.numel // ALIGNMENT) * ALIGNMENT for piece in others)
    return (*others, replace(last, start=start))
