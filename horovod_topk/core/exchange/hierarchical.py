"""The hierarchical exchange: dense within a node, sparse between nodes.

On every node the first L ranks own shards, L being the number of ranks of the smallest node; see
`core.plan.shards`. The other ranks only take part in the sums.

    reduce    local reduce-scatter: within a node, each owner gets the sum of its shards
    gather    cross allgather: between nodes, owners of the same shards send the largest of e + sum;
              with some methods they announce numbers before it
    spread    local allgather: within a node, owners send the payloads that they have gathered

Only owners have residuals: e of 1 / L of the model each, in units of a node's sum. Every rank
decodes all payloads, those of each shard in the order of their ranks, to the sum or the mean over
all ranks.

Owners spread payloads and not decoded gradients. That moves fewer bytes as long as the payloads of
all nodes together are shorter than their shard, and all ranks get equal bits as with an allgather:
all decode the same payloads.

A node of one rank leaves out `reduce` and `spread`, and a single node leaves out `gather`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from horovod_topk.core.codec.codec import PayloadCodec
from horovod_topk.core.codec.momentum import NO_MOMENTS, OptimizerMoments
from horovod_topk.core.exchange.announcing import Encoder, announced_bytes, announcement
from horovod_topk.core.exchange.protocol import (
    BucketExchange,
    Collective,
    Exchange,
    Pending,
    Storage,
    Traffic,
    check_split,
    wait_for_dropped,
)
from horovod_topk.core.plan.buckets import WIDTH, BucketPlan, Plan
from horovod_topk.core.plan.nodes import Nodes
from horovod_topk.core.plan.shards import NodePlan, first_block, shard_sums
from horovod_topk.core.state.residual import Arenas, Squares
from horovod_topk.errors import TopKError

Array = TypeVar("Array")


@dataclass(frozen=True)
class Groups(Generic[Array]):
    """The local and the cross group of a rank: its node, and the owners of the same shards."""

    nodes: Nodes
    rank: int
    local: Collective[Array] | None  # the ranks of this node; None: only this rank
    cross: Collective[Array] | None  # owners of the same shards; None: none, or only this rank

    @classmethod
    def of(cls, collective: Collective[Array], nodes: Nodes) -> Groups[Array]:
        """Make the groups of this rank. A collective."""
        groups = nodes.groups
        found = dict(zip(groups, collective.split(groups), strict=True))
        rank = collective.rank
        cross = next((group for group in nodes.cross_groups if rank in group), ())
        return cls(nodes, rank, found.get(nodes.of(rank)), found.get(cross))

    @property
    def shard(self) -> int | None:
        """Which shards this rank owns; None: it owns none."""
        position = self.nodes.position(self.rank)
        return position if position < self.nodes.owners else None

    @property
    def size(self) -> int:
        """Number of ranks on this node."""
        return len(self.nodes.of(self.rank))


class HierarchicalExchange(Exchange[Array]):
    """Gradients are summed dense within a node, and sent sparse between nodes."""

    kind = "hierarchical"

    def __init__(
        self, collective: Collective[Array], groups: Groups[Array], because: str = ""
    ) -> None:
        super().__init__(collective, groups.nodes, because)
        self.groups = groups
        self._plans: dict[bytes, NodePlan] = {}  # by their bucket's digest

    @property
    def owner(self) -> Mapping[str, object]:
        """This rank, the number of ranks, and the ranks of each node."""
        return {**super().owner, "nodes": [list(node) for node in self.groups.nodes.ranks]}

    def sharded(self, bucket: BucketPlan) -> NodePlan:
        """The plan of a bucket that is split among owners."""
        if bucket.digest not in self._plans:
            split = self._shard(bucket)
            check_split(bucket, max(each.numel for each in split.sums), "elements")
            self._plans[bucket.digest] = split
        return self._plans[bucket.digest]

    def _shard(self, bucket: BucketPlan) -> NodePlan:
        return shard_sums(bucket, self.groups.nodes)

    def holders(self, bucket: BucketPlan) -> Sequence[BucketPlan]:
        """No plan: ranks have no residuals of their own gradients."""
        return ()

    @property
    def parts(self) -> int:
        """Owners on each node: as many as the smallest node has ranks."""
        return self.groups.nodes.owners

    @property
    def part(self) -> int | None:
        """This rank's position on its node, if it owns shards."""
        return self.groups.shard

    def owned(self, bucket: BucketPlan) -> Sequence[BucketPlan]:
        """The plan of the node's sums of this rank's shards, if it owns any."""
        shard = self.groups.shard
        return () if shard is None else (self.sharded(bucket).sums[shard],)

    def of(
        self, bucket: BucketPlan, own: Storage[Array], codec: PayloadCodec[Array]
    ) -> BucketExchange[Array]:
        """The exchange of a bucket: a local reduce-scatter, a cross and a local allgather."""
        (arenas,) = own.owned or (None,)
        return HierarchicalBucket(self.sharded(bucket), arenas, codec, self.groups)

    def buffer_bytes(self, plan: Plan) -> int:
        """`Exchange.buffer_bytes`: gradients, the node's parts of owned shards, and payloads."""
        groups, total = self.groups, 0
        owners, nodes = groups.nodes.owners, len(groups.nodes.ranks)
        for each in (self.sharded(bucket) for bucket in plan.buckets):
            own = [] if groups.shard is None else [each.sums[groups.shard]]
            total += _dense_bytes(each.sums) + groups.size * _dense_bytes(own)
            total += (len(own) * (1 + nodes) + owners * nodes) * each.sum_bytes
        return total

    def _count(self, plan: Plan) -> Traffic:
        """Bytes of a step: to each owner on the node directly, then twice in a ring."""
        groups, nodes = self.groups, self.groups.nodes
        size, held = sum(self.sharded(each).sum_bytes for each in plan.buckets), len(nodes.ranks)
        crossing, shards = self._by_owner(plan)
        handed = crossing[groups.shard] if groups.shard is not None and held > 1 else 0
        sent = (held - 1) * handed
        if groups.size > 1:
            kept, forwarded = (
                (0, 0) if groups.shard is None else (shards[groups.shard], held * size)
            )
            handed += sum(shards) + forwarded
            following = (nodes.position(self.rank) + 1) % groups.size
            forwarding = nodes.owners - (following < nodes.owners)  # all but the next one's own
            sent += sum(shards) - kept + forwarding * held * size

        def between(rank: int) -> int:
            position = nodes.position(rank)
            return (held - 1) * crossing[position] if position < nodes.owners else 0

        entries = sum(each.entries for bucket in plan.buckets for each in self.owned(bucket))
        return self._traffic(plan, entries, handed, sent, between)

    def _by_owner(self, plan: Plan) -> tuple[list[int], list[int]]:
        """For each owner: bytes of what it sends to another node, and of its dense shards."""
        split = [self.sharded(bucket) for bucket in plan.buckets]
        crossing, shards = [], []
        for owner in range(self.groups.nodes.owners):
            sums = [each.sums[owner] for each in split]
            sizes = (
                each.sum_bytes + announced_bytes([own])
                for each, own in zip(split, sums, strict=True)
            )
            crossing.append(sum(sizes))
            shards.append(_dense_bytes(sums))
        return crossing, shards


def _dense_bytes(plans: Iterable[BucketPlan]) -> int:
    """Bytes of the arenas of some plans."""
    return sum(plan.numel * WIDTH[plan.residual_dtype] for plan in plans)


@dataclass(frozen=True)
class _Done(Generic[Array]):
    """The finished collective of a group of one rank."""

    result: Array

    def wait(self) -> Array:
        return self.result


class HierarchicalBucket(BucketExchange[Array]):
    """`BucketExchange` of one bucket: `reduce`, `gather` and `spread`.

    Args:
        owned: arenas of the owner's residual, if this rank owns shards.
    """

    def __init__(
        self,
        plan: NodePlan,
        owned: Arenas[Array] | None,
        codec: PayloadCodec[Array],
        groups: Groups[Array],
    ) -> None:
        super().__init__(() if owned is None else [owned], codec)
        self._plan, self._owned, self._groups = plan, owned, groups
        ops, device = codec.ops, plan.bucket.device
        self._out = ops.zeros(
            sum(each.numel for each in plan.sums), plan.bucket.residual_dtype, device
        )
        self._split = list(self._split_gradients())
        count = plan.sum_bytes if owned is not None else 0
        self._back = ops.zeros(count, "uint8", device)
        self._encoder: Encoder[Array] | None = None
        if owned is not None:
            codec.open_payload(owned.plan, self._back)
            self._encoder = Encoder([owned], [self._back], codec, groups.cross)
        self.stages = 2 + any(announcement([each]) is not None for each in plan.sums)
        self._reduced: Pending[Array] | None = None
        self._gathered: Pending[Array] | None = None

    def send(
        self, gradients: Sequence[Array], name: str, moments: OptimizerMoments[Array] = NO_MOMENTS
    ) -> None:
        """`BucketExchange.send`."""
        self._name = name
        for gradient, (firsts, outs) in zip(gradients, self._split, strict=True):
            self._ops.split_shards(gradient, firsts, outs)
        self._reduced = self._reduce()

    def advance(self) -> None:
        """`BucketExchange.advance`: start `gather` once sums arrived, then `spread`."""
        if self._reduced is not None:
            self._compress()
        elif self._encoder is not None and self._encoder.waits:
            self._complete(self._encoder)
        elif self._gathered is not None:
            self._spread_gathered()

    def drain(self) -> None:
        """`BucketExchange.drain`. Owners send flags to ranks that go on, which roll the step back.

        The collectives that send flags are not waited for, as ranks may drain buckets in different
        orders. Payloads that `gather` has sent already are spread: other nodes have them too.
        """
        if self._reduced is not None:
            with contextlib.suppress(TopKError):  # the sum is not used
                self._reduced.wait()
            self._reduced = None
            self._unwanted += self._abort()
        if self._encoder is not None and self._encoder.waits and self._encoder.drain():
            self._unwanted += self._flag_all()
        if self._gathered is not None:
            self._spread_gathered()
        super().drain()

    def receive(self, targets: Sequence[Array], gain: float = 1.0) -> Sequence[bool]:
        """`BucketExchange.receive`."""
        plan, nodes = self._plan, self._groups.nodes
        while self._pending is None:
            self.advance()
        self._arrived = self._result()
        self._codec.check_length(plan.result, self._arrived, nodes.owners * len(nodes.ranks))
        ranks = sum(nodes.sizes)
        scale = 1.0 / ranks if plan.bucket.reduction == "average" else 1.0
        return self._codec.decode(plan.result, self._in_rows(), gain * scale, targets)

    def squares(self, *, committed: bool) -> Squares:
        """`BucketExchange.squares`: of this rank's gradients, and of its payload as an owner."""
        gradient = self._ops.norm(self._out) ** 2
        if self._owned is None:
            return Squares(gradient)
        owned = self._codec.squares(self._owned, self._back, committed=committed)
        return replace(owned, gradient=gradient)

    # The three collectives.

    def _reduce(self) -> Pending[Array]:
        if self._groups.local is None:
            return _Done(self._out)
        counts = [each.numel for each in self._plan.sums]
        counts += [0] * (self._groups.size - len(counts))
        return self._groups.local.reduce_scatter(self._out, counts, f"{self._name}.reduce")

    def _compress(self) -> None:
        assert self._reduced is not None
        pending, self._reduced = self._reduced, None
        try:
            total = pending.wait()
        except TopKError:  # other ranks wait for this rank: send flags
            *others, self._pending = self._abort()
            self._unwanted += others
            raise
        wait_for_dropped(self._unwanted)
        if self._owned is None or self._encoder is None:
            # An empty array that depends on the sum, so that a graph runs the reduce-scatter.
            self._gathered = _Done(self._ops.pack_values(total, self._plan.bucket.residual_dtype))
            return
        tensors = self._owned.plan.tensors
        sums = [self._ops.view(total, t.start, t.stop) for t in tensors]
        self._encoder.begin(sums, self._name)
        if not self._encoder.waits:
            self._gathered = self._gather()

    def _complete(self, encoder: Encoder[Array]) -> None:
        """Encode with the announcements, and start `gather`."""
        try:
            encoder.complete()
        except TopKError:  # other ranks wait for this rank: send flags
            gathered, self._pending = self._flag_all()
            self._unwanted.append(gathered)
            raise
        self._gathered = self._gather()

    def _gather(self) -> Pending[Array]:
        if self._groups.cross is None:
            return _Done(self._back)
        return self._groups.cross.allgather(self._back, f"{self._name}.gather")

    def _spread_gathered(self) -> None:
        assert self._gathered is not None
        pending, self._gathered = self._gathered, None
        self._pending = self._spread_payloads(pending.wait())

    def _spread_payloads(self, payloads: Array) -> Pending[Array]:
        if self._groups.local is None:
            return _Done(payloads)
        nodes = self._groups.nodes
        counts = [len(nodes.ranks) * self._plan.sum_bytes] * nodes.owners
        counts += [0] * (self._groups.size - len(counts))
        return self._groups.local.allgather(payloads, f"{self._name}.spread", counts)

    # Splitting gradients, flags and the order of payloads.

    def _split_gradients(self) -> Iterator[tuple[list[int], list[Array]]]:
        """For each gradient, the first blocks of its shards, and their views in `_out`."""
        ends = list(itertools.accumulate(each.numel for each in self._plan.sums))
        parts = [
            self._ops.view(self._out, end - each.numel, end)
            for each, end in zip(self._plan.sums, ends, strict=True)
        ]
        owners = range(len(parts))
        for position, tensor in enumerate(self._plan.bucket.tensors):
            firsts = [first_block(tensor.spec.name, len(parts), owner) for owner in owners]
            places = [each.tensors[position] for each in self._plan.sums]
            yield (
                firsts,
                [self._ops.view(p, t.start, t.stop) for p, t in zip(parts, places, strict=True)],
            )

    def _abort(self) -> list[Pending[Array]]:
        """Start all remaining collectives with flags for every tensor."""
        announced = [] if self._encoder is None else self._encoder.abort(self._name)
        return [*announced, *self._flag_all()]

    def _flag_all(self) -> tuple[Pending[Array], Pending[Array]]:
        """Start `gather` and `spread` with payloads that flag every tensor as non-finite."""
        wait_for_dropped(self._unwanted)
        if self._owned is None:
            return self._gather(), self._spread_payloads(self._back)
        self._codec.flag_all(self._owned.plan, self._back)
        count, size = len(self._groups.nodes.ranks), self._plan.sum_bytes
        everyones = self._ops.zeros(count * size, "uint8", self._plan.bucket.device)
        for at in range(0, count * size, size):
            self._ops.store(everyones, at, self._back)
        return self._gather(), self._spread_payloads(everyones)

    def _in_rows(self) -> Array:
        """Reorder received payloads: from shard after shard to node after node."""
        ops, size = self._ops, self._plan.sum_bytes
        owners, nodes = self._groups.nodes.owners, len(self._groups.nodes.ranks)
        if owners == 1 or nodes == 1:
            return self._arrived
        ordered = ops.zeros(owners * nodes * size, "uint8", self._plan.bucket.device)
        for position in range(owners * nodes):
            row, owner = divmod(position, owners)
            at = (owner * nodes + row) * size
            ops.store(ordered, position * size, ops.view(self._arrived, at, at + size))
        return ordered
