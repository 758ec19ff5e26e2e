"""How payloads cross the network, over one small protocol.

Each exchange knows who keeps residuals for what, how many bytes travel, and how one bucket is sent
(`horovod_topk.core.route`, `horovod_topk.core.hierarchy`). Which one a setting names is for
`horovod_topk.core.choice` to say.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from horovod_topk.core.allreduce import LANES, Allreduced
from horovod_topk.core.codec import PayloadCodec
from horovod_topk.core.hierarchy import Hierarchical, Team
from horovod_topk.core.nodes import Nodes
from horovod_topk.core.plan import WIDTH, BucketPlan, Plan
from horovod_topk.core.residual import Arenas
from horovod_topk.core.rounds import Reduced, round_plans
from horovod_topk.core.route import Collective, Direct, Pending, Route, Sharded
from horovod_topk.core.shards import NodePlan, ShardedPlan, shard, shard_sums
from horovod_topk.errors import TensorTooLargeError
from horovod_topk.ops import Ops

Array = TypeVar("Array")

LARGEST_SPLIT = 2**31 - 1  # Horovod's splits are of 32 bits

__all__ = [
    "Allgather",
    "AllreduceExchange",
    "Collective",
    "Exchange",
    "HierarchicalExchange",
    "Pending",
    "ReduceExchange",
    "ShardedExchange",
    "Traffic",
    "ring_allreduce_bytes",
]


@dataclass(frozen=True)
class Traffic:
    """Bytes of one rank and step."""

    selected: int  # values handed to collectives
    payload_bytes: int  # their bytes, and all that travels with them
    sent_bytes: int  # sent for them
    dense_bytes: int  # sent by a ring allreduce of the dense gradients instead
    between_bytes: int | None  # of `sent_bytes`, those to other nodes; None: nodes are not known
    node_bytes: int | None  # that leave the busiest node, of all its ranks together


class Exchange(Protocol[Array]):
    """What the compressor asks of an exchange."""

    @property
    def ranks(self) -> int:
        """How many ranks exchange."""
        ...

    @property
    def rank(self) -> int:
        """This one among them."""
        ...

    @property
    def kind(self) -> str:
        """The setting that names it."""
        ...

    @property
    def because(self) -> str:
        """Why it was chosen, or what became of it, in one line; empty: it was asked for."""
        ...

    @property
    def owner(self) -> Mapping[str, object]:
        """Whose the residuals of shards are: this rank's, of how many, on which nodes."""
        ...

    @property
    def nodes(self) -> Nodes | None:
        """Who shares a node, if that is known."""
        ...

    @property
    def turns(self) -> int:
        """How often a bucket has to advance before it can be received."""
        ...

    def holders(self, bucket: BucketPlan) -> Sequence[BucketPlan]:
        """Plans whose arenas together hold this rank's residuals of a bucket."""
        ...

    @property
    def keeps(self) -> bool:
        """Whether a rank keeps residuals of its own gradients."""
        ...

    @property
    def parts(self) -> int:
        """Owners that each tensor is split among; 0: there are none."""
        ...

    @property
    def part(self) -> int | None:
        """Which of the owners this rank is; None: none."""
        ...

    def owned(self, bucket: BucketPlan) -> Sequence[BucketPlan]:
        """The plan of what this rank owns of a bucket for all ranks, if it owns something."""
        ...

    def route(
        self,
        bucket: BucketPlan,
        residuals: Sequence[Arenas[Array]],
        owned: Sequence[Arenas[Array]],
        states: Mapping[str, Arenas[Array]],
        ops: Ops[Array],
        codec: PayloadCodec[Array],
    ) -> Route[Array]:
        """A bucket's way.

        residuals: one for each of `holders`.
        owned: one for each of `owned`.
        states: the method's own, by name.
        """
        ...

    def traffic(self, plan: Plan) -> Traffic:
        """Bytes of a step."""
        ...


class _Over(abc.ABC, Generic[Array]):
    """What exchanges over a collective have in common.

    Args:
        collective: all ranks.
        nodes: who shares a node, if that is known; for `traffic`.
        because: `Exchange.because`.
    """

    def __init__(
        self, collective: Collective[Array], nodes: Nodes | None = None, because: str = ""
    ) -> None:
        self._collective = collective
        self.nodes = nodes
        self.because = because
        self._counted: dict[tuple[bytes, int], Traffic] = {}  # by their plan's digest

    @property
    def ranks(self) -> int:
        """How many ranks exchange."""
        return self._collective.size

    @property
    def rank(self) -> int:
        """This one among them."""
        return self._collective.rank

    @property
    def owner(self) -> Mapping[str, object]:
        """This rank, of how many."""
        return {"ranks": self.ranks, "rank": self.rank}

    def traffic(self, plan: Plan) -> Traffic:
        """Bytes of a step; counted once, as every step asks."""
        key = plan.digest, self.ranks  # those of an elastic job come and go
        if key not in self._counted:
            self._counted[key] = self._count(plan)
        return self._counted[key]

    @abc.abstractmethod
    def _count(self, plan: Plan) -> Traffic:
        """Bytes of a step."""

    def _is_at_an_edge(self, rank: int) -> bool:
        """Whether the next rank in a ring of all is on another node."""
        assert self.nodes is not None
        return (rank + 1) % self.ranks not in self.nodes.of(rank)

    def _traffic(
        self,
        plan: Plan,
        selected: int,
        payload_bytes: int,
        sent_bytes: int,
        between: Callable[[int], int],
    ) -> Traffic:
        """between: bytes that a rank sends to other nodes."""
        dense = sum(bucket.dense_bytes for bucket in plan.buckets)
        dense_bytes = ring_allreduce_bytes(dense, self.ranks)
        mine, busiest = None, None
        if self.nodes is not None:
            mine = between(self.rank)
            busiest = max(sum(map(between, node)) for node in self.nodes.ranks)
        return Traffic(selected, payload_bytes, sent_bytes, dense_bytes, mine, busiest)


class Allgather(_Over[Array]):
    """Every rank sends its payload to every other; bytes grow with the number of ranks."""

    kind, turns, keeps, parts, part = "allgather", 0, True, 0, None

    def holders(self, bucket: BucketPlan) -> Sequence[BucketPlan]:
        """The bucket itself."""
        return (bucket,)

    def owned(self, bucket: BucketPlan) -> Sequence[BucketPlan]:
        """Nothing."""
        return ()

    def route(
        self,
        bucket: BucketPlan,
        residuals: Sequence[Arenas[Array]],
        owned: Sequence[Arenas[Array]],
        states: Mapping[str, Arenas[Array]],
        ops: Ops[Array],
        codec: PayloadCodec[Array],
    ) -> Route[Array]:
        """One allgather."""
        (arenas,) = residuals
        return Direct(bucket, arenas, ops, codec, self._collective)

    def _count(self, plan: Plan) -> Traffic:
        """Bytes of a step, sent in a ring from rank to rank."""
        payload_bytes = sum(bucket.layout.payload_bytes for bucket in plan.buckets)
        entries = sum(bucket.entries for bucket in plan.buckets)
        sent_bytes = (self.ranks - 1) * payload_bytes

        def between(rank: int) -> int:
            return sent_bytes if self._is_at_an_edge(rank) else 0

        return self._traffic(plan, entries, payload_bytes, sent_bytes, between)


class ShardedExchange(_Over[Array]):
    """Entries go to the owner of their elements, and the owners' sums back to all.

    About (P - 1) / P of a payload goes in each direction: more where shards become so small that
    rounding up and headers count.
    """

    kind, turns, keeps = "sharded", 1, True

    def __init__(
        self, collective: Collective[Array], nodes: Nodes | None = None, because: str = ""
    ) -> None:
        super().__init__(collective, nodes, because)
        self._plans: dict[bytes, ShardedPlan] = {}  # by their bucket's digest

    def dealt(self, bucket: BucketPlan) -> ShardedPlan:
        """A bucket as it is dealt out."""
        if bucket.digest not in self._plans:
            dealt = shard(bucket, self.ranks)
            _check_split(bucket, dealt.scatter[0].layout.payload_bytes, "bytes")
            self._plans[bucket.digest] = dealt
        return self._plans[bucket.digest]

    def holders(self, bucket: BucketPlan) -> Sequence[BucketPlan]:
        """A plan for each owner."""
        return self.dealt(bucket).scatter

    @property
    def parts(self) -> int:
        """As many as ranks."""
        return self.ranks

    @property
    def part(self) -> int:
        """This rank."""
        return self.rank

    def owned(self, bucket: BucketPlan) -> Sequence[BucketPlan]:
        """The means of this rank's shards."""
        return (self.dealt(bucket).gather[self.rank],)

    def route(
        self,
        bucket: BucketPlan,
        residuals: Sequence[Arenas[Array]],
        owned: Sequence[Arenas[Array]],
        states: Mapping[str, Arenas[Array]],
        ops: Ops[Array],
        codec: PayloadCodec[Array],
    ) -> Route[Array]:
        """One alltoall and one allgather."""
        (mine,) = owned
        return Sharded(self.dealt(bucket), residuals, mine, ops, codec, self._collective)

    def _count(self, plan: Plan) -> Traffic:
        """Bytes of a step: to each owner directly, and back in a ring from rank to rank."""
        others, dealt = self.ranks - 1, [self.dealt(bucket) for bucket in plan.buckets]
        there = sum(each.scatter_bytes for each in dealt)
        back = sum(each.gather_bytes for each in dealt)
        mine = [leg for each in dealt for leg in (*each.scatter, each.back[self.rank])]
        entries = sum(each.entries for each in mine)

        def between(rank: int) -> int:
            assert self.nodes is not None
            away = self.ranks - len(self.nodes.of(rank))
            return away * there + self._is_at_an_edge(rank) * others * back

        payload_bytes, sent_bytes = self.ranks * there + back, others * (there + back)
        return self._traffic(plan, entries, payload_bytes, sent_bytes, between)


class AllreduceExchange(_Over[Array]):
    """Dense gradients are added up by Horovod's own allreduce."""

    kind, turns, keeps, parts, part = "allreduce", 0, False, 0, None

    def holders(self, bucket: BucketPlan) -> Sequence[BucketPlan]:
        """None: nothing is left behind."""
        return ()

    def owned(self, bucket: BucketPlan) -> Sequence[BucketPlan]:
        """Nothing."""
        return ()

    def route(
        self,
        bucket: BucketPlan,
        residuals: Sequence[Arenas[Array]],
        owned: Sequence[Arenas[Array]],
        states: Mapping[str, Arenas[Array]],
        ops: Ops[Array],
        codec: PayloadCodec[Array],
    ) -> Route[Array]:
        """One allreduce."""
        return Allreduced(bucket, ops, self._collective)

    def _count(self, plan: Plan) -> Traffic:
        """Bytes of a step, sent in a ring from rank to rank."""
        size = sum((b.numel + LANES) * WIDTH[b.residual_dtype] for b in plan.buckets)
        entries = sum(bucket.entries for bucket in plan.buckets)
        sent_bytes = ring_allreduce_bytes(size, self.ranks)

        def between(rank: int) -> int:
            return sent_bytes if self._is_at_an_edge(rank) else 0

        return self._traffic(plan, entries, size, sent_bytes, between)


class ReduceExchange(_Over[Array]):
    """Arrays of a method of rounds are added up at their elements' owners, round after round."""

    kind, keeps, parts, part = "reduce", True, 0, None

    def __init__(
        self, collective: Collective[Array], nodes: Nodes | None = None, because: str = ""
    ) -> None:
        super().__init__(collective, nodes, because)
        self.turns = 1

    def holders(self, bucket: BucketPlan) -> Sequence[BucketPlan]:
        """The bucket itself."""
        return (bucket,)

    def owned(self, bucket: BucketPlan) -> Sequence[BucketPlan]:
        """Nothing."""
        return ()

    def route(
        self,
        bucket: BucketPlan,
        residuals: Sequence[Arenas[Array]],
        owned: Sequence[Arenas[Array]],
        states: Mapping[str, Arenas[Array]],
        ops: Ops[Array],
        codec: PayloadCodec[Array],
    ) -> Route[Array]:
        """The rounds of the bucket's method."""
        (arenas,) = residuals
        route = Reduced(bucket, arenas, states, ops, codec, self._collective)
        self.turns = max(self.turns, 2 * route.rounds - 1)
        return route

    def _count(self, plan: Plan) -> Traffic:
        """Bytes of a step: of each round to each owner directly, and back in a ring."""
        entries = payload_bytes = sent_bytes = there = back = 0
        others = self.ranks - 1
        for bucket in plan.buckets:
            for each in round_plans(bucket):
                split = shard(each, self.ranks)
                there, back = there + split.scatter_bytes, back + split.gather_bytes
                entries += each.entries + split.gather[self.rank].entries
        payload_bytes, sent_bytes = self.ranks * there + back, others * (there + back)

        def between(rank: int) -> int:
            assert self.nodes is not None
            away = self.ranks - len(self.nodes.of(rank))
            return away * there + self._is_at_an_edge(rank) * others * back

        return self._traffic(plan, entries, payload_bytes, sent_bytes, between)


class HierarchicalExchange(_Over[Array]):
    """Gradients are summed dense within a node, and travel sparse between nodes.

    Args:
        collective: all ranks.
        team: with whom this one exchanges.
        because: `Exchange.because`.
    """

    kind, turns, keeps = "hierarchical", 2, False

    def __init__(self, collective: Collective[Array], team: Team[Array], because: str = "") -> None:
        super().__init__(collective, team.nodes, because)
        self.team = team
        self._plans: dict[bytes, NodePlan] = {}  # by their bucket's digest

    @property
    def owner(self) -> Mapping[str, object]:
        """This rank, and who shares a node."""
        return {**super().owner, "nodes": [list(node) for node in self.team.nodes.ranks]}

    def dealt(self, bucket: BucketPlan) -> NodePlan:
        """A bucket as it is dealt out."""
        if bucket.digest not in self._plans:
            dealt = shard_sums(bucket, self.team.nodes)
            _check_split(bucket, max(each.numel for each in dealt.sums), "elements")
            self._plans[bucket.digest] = dealt
        return self._plans[bucket.digest]

    def holders(self, bucket: BucketPlan) -> Sequence[BucketPlan]:
        """None: a rank sends all that it has to the owners on its node."""
        return ()

    @property
    def parts(self) -> int:
        """As many as the smallest node has ranks."""
        return self.team.nodes.owners

    @property
    def part(self) -> int | None:
        """This rank's position on its node, if it owns something."""
        return self.team.lane

    def owned(self, bucket: BucketPlan) -> Sequence[BucketPlan]:
        """The sums of this rank's shards, if it owns any."""
        lane = self.team.lane
        return () if lane is None else (self.dealt(bucket).sums[lane],)

    def route(
        self,
        bucket: BucketPlan,
        residuals: Sequence[Arenas[Array]],
        owned: Sequence[Arenas[Array]],
        states: Mapping[str, Arenas[Array]],
        ops: Ops[Array],
        codec: PayloadCodec[Array],
    ) -> Route[Array]:
        """A dense sum within the node, an allgather between nodes, one within the node."""
        (arenas,) = owned or (None,)
        return Hierarchical(self.dealt(bucket), arenas, ops, codec, self.team)

    def _count(self, plan: Plan) -> Traffic:
        """Bytes of a step: to each owner on the node directly, then twice in a ring."""
        team, nodes = self.team, self.team.nodes
        dealt = [self.dealt(bucket) for bucket in plan.buckets]
        size, held = sum(each.sum_bytes for each in dealt), len(nodes.ranks)
        handed = size if team.lane is not None and held > 1 else 0
        sent = (held - 1) * handed
        if team.size > 1:
            shards = [_dense_bytes(each.sums[i] for each in dealt) for i in range(nodes.owners)]
            kept, forwarded = (0, 0) if team.lane is None else (shards[team.lane], held * size)
            handed += sum(shards) + forwarded
            following = (nodes.position(self.rank) + 1) % team.size
            forwarding = nodes.owners - (following < nodes.owners)  # all but the next one's own
            sent += sum(shards) - kept + forwarding * held * size

        def between(rank: int) -> int:
            return (held - 1) * size if nodes.position(rank) < nodes.owners else 0

        entries = sum(each.entries for bucket in plan.buckets for each in self.owned(bucket))
        return self._traffic(plan, entries, handed, sent, between)


def _dense_bytes(plans: Iterable[BucketPlan]) -> int:
    """Bytes of arenas."""
    return sum(plan.numel * WIDTH[plan.residual_dtype] for plan in plans)


def ring_allreduce_bytes(dense_bytes: int, ranks: int) -> int:
    """Bytes a rank sends in a ring allreduce: 2 (P - 1) / P of the data (Patarasuk, Yuan 2009)."""
    return 2 * (ranks - 1) * dense_bytes // ranks


def _check_split(bucket: BucketPlan, size: int, unit: str) -> None:
    """Refuse what an alltoall or a reduce-scatter cannot deal out.

    Raises:
        TensorTooLargeError: it is.
    """
    if size > LARGEST_SPLIT:
        largest = max(bucket.tensors, key=lambda tensor: tensor.spec.numel).spec
        raise TensorTooLargeError(
            f"each owner gets {size} {unit} of its bucket, at most {LARGEST_SPLIT} can be sent",
            tensor=largest.name,
            cure="Split the parameter, start more ranks, or pass exchange='allgather'",
        )
