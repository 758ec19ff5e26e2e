"""Plans of exchanges with owners: who owns which elements, and the payloads to and from owners.

A tensor's elements are split among owners in blocks of 512: of P owners, owner p has blocks f,
f + P, f + 2 P, ... with f = p - c modulo P and c the CRC-32 of the tensor's name. So rows or layers
with many entries are spread over all owners, small tensors do not all belong to the first owner,
and ownership does not depend on other tensors. An owner's elements of a tensor, in their order, are
its shard. Selection is for each shard, so that every payload's size follows from the plan alone.

    scatter   each rank sends every owner the largest entries of its shards   ratio
    gather    each owner sends all ranks the largest entries of the mean      gather_ratio

In a hierarchical exchange every node has an owner of every shard:

    sums      each owner sends all nodes the largest entries of its node's sum   ratio

All payloads of a bucket in one direction are as long as the longest of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from horovod_topk.core.plan.buckets import BucketPlan, lay_out
from horovod_topk.core.plan.nodes import Nodes
from horovod_topk.methods.protocol import Piece
from horovod_topk.ops.coding import SHARD_BLOCK, shard_numel

ALIGNMENT = 64  # elements; shards begin at cache lines in the arenas


@dataclass(frozen=True)
class ShardedPlan:
    """One bucket's payloads to and from owners."""

    bucket: BucketPlan  # the bucket that is split
    scatter: tuple[BucketPlan, ...]  # to each owner, in the layout of whole gradients
    back: tuple[BucketPlan, ...]  # from each owner, in the layout of whole gradients

    @cached_property
    def arrive(self) -> tuple[BucketPlan, ...]:
        """Payloads of `scatter`, decoded to packed shards."""
        return tuple(map(_packed, self.scatter))

    @cached_property
    def gather(self) -> tuple[BucketPlan, ...]:
        """Payloads of `back`, encoded from packed shards."""
        return tuple(map(_packed, self.back))

    @cached_property
    def result(self) -> BucketPlan:
        """All payloads of `back`, one after another, decoded to gradients."""
        return _joined(self.back)

    @property
    def scatter_bytes(self) -> int:
        """Bytes of one payload to one owner."""
        return self.scatter[0].layout.payload_bytes

    @property
    def gather_bytes(self) -> int:
        """Bytes of one payload from one owner."""
        return self.back[0].layout.payload_bytes


@dataclass(frozen=True)
class NodePlan:
    """One bucket's payloads between nodes."""

    bucket: BucketPlan  # the bucket that is split
    sums: tuple[BucketPlan, ...]  # from each owner of a node, encoded from packed shards
    result: BucketPlan  # the payloads of all owners one after another, for each node

    @property
    def sum_bytes(self) -> int:
        """Bytes of one owner's payload."""
        return self.sums[0].layout.payload_bytes


def first_block(name: str, parts: int, part: int) -> int:
    """The first block of a tensor that belongs to an owner."""
    return (part - zlib.crc32(name.encode())) % parts


def size_changes(name: str, numel: int, parts: int) -> set[int]:
    """The owners whose shards of a tensor may be of another size than those of the owner before."""
    begin = -first_block(name, parts, 0) % parts  # owner of the first block
    rest = numel // SHARD_BLOCK % parts
    return {(begin + each) % parts for each in (0, rest, rest + 1)}


def shard(bucket: BucketPlan, parts: int) -> ShardedPlan:
    """Split a bucket among `parts` owners."""
    scatter, back = _directed(bucket, parts, "scatter"), _directed(bucket, parts, "gather")
    return ShardedPlan(bucket, scatter, back)


def shard_sums(bucket: BucketPlan, nodes: Nodes) -> NodePlan:
    """Split a bucket among the owners of each node."""
    sums = _directed(bucket, nodes.owners, "sums")
    senders = tuple(rank for row in zip(*nodes.cross_groups, strict=True) for rank in row)
    result = replace(_joined(sums), senders=senders)
    return NodePlan(bucket, tuple(map(_packed, sums)), result)


def _directed(bucket: BucketPlan, parts: int, direction: str) -> tuple[BucketPlan, ...]:
    """Payloads to or from each owner, padded to the longest, for gradients that are split."""
    plans = [
        lay_out(
            bucket.ordinal,
            _shards(bucket, parts, part),
            direction,
            bucket.config,
            bucket.reduction,
            alignment=ALIGNMENT,
            owners=parts,
            identity=[part, SHARD_BLOCK],
            part=part,
            measures=()
            if direction == "scatter"
            else bucket.measures,  # scatter reaches one rank only
        )
        for part in range(parts)
    ]
    most = max(plan.layout.payload_bytes for plan in plans)
    return tuple(replace(plan, layout=replace(plan.layout, payload_bytes=most)) for plan in plans)


def _shards(bucket: BucketPlan, parts: int, part: int) -> list[Piece]:
    """The shard of each tensor that an owner has."""
    shards = []
    for position, tensor in enumerate(bucket.tensors):
        first = first_block(tensor.spec.name, parts, part)
        numel = shard_numel(tensor.spec.numel, parts, first)
        shards.append(Piece(tensor.spec, numel, position, first))
    return shards


def _packed(plan: BucketPlan) -> BucketPlan:
    """The same payload for shards in memory of their own, in the residual's dtype."""
    tensors = tuple(
        replace(
            tensor,
            spec=replace(tensor.spec, shape=(tensor.numel,), dtype=plan.residual_dtype),
            first=0,
        )
        for tensor in plan.tensors
    )
    return replace(plan, tensors=tensors, parts=1)


def _joined(plans: Sequence[BucketPlan]) -> BucketPlan:
    """The plan of all payloads, one after another, read as one."""
    size = plans[0].layout.payload_bytes
    tensors = tuple(
        tensor.moved(p * size) for p, plan in enumerate(plans) for tensor in plan.tensors
    )
    layout = replace(plans[0].layout, payload_bytes=size * len(plans))
    digests = tuple(plan.digest for plan in plans)
    return replace(plans[0], tensors=tensors, layout=layout, digests=digests)
