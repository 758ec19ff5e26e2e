"""Bytes that exchanges would send, counted by the exchanges' own code without a network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn, cast

from horovod_topk.core.exchange.hierarchical import Groups, HierarchicalExchange
from horovod_topk.core.exchange.loopback import Loopback
from horovod_topk.core.exchange.protocol import Exchange
from horovod_topk.core.exchange.reduce import ReduceExchange
from horovod_topk.core.exchange.selection import fewest, make_exchange
from horovod_topk.core.exchange.sharded import ShardedExchange
from horovod_topk.core.plan.buckets import WIDTH, BucketPlan, Plan
from horovod_topk.core.plan.nodes import Nodes
from horovod_topk.core.plan.shards import NodePlan, ShardedPlan
from horovod_topk.cost import owners
from horovod_topk.ops import Ops

NO_ARRAYS = cast("Ops[bytes]", None)


class Nobody(Loopback[bytes]):
    """A network without arrays: its collectives have a size and a rank, but refuse to send."""

    def post(self, rank: int, name: str, payload: bytes) -> NoReturn:
        """Raise an error."""
        raise TypeError("nothing is sent for a plan")


def nodes_of(ranks: int, local_size: int) -> Nodes:
    """Return nodes with `local_size` ranks each; the last one may have fewer."""
    starts = range(0, ranks, local_size)
    return Nodes(tuple(tuple(range(at, min(at + local_size, ranks))) for at in starts))


def exchange_of(
    kind: str, nodes: Nodes, rank: int = 0, *, in_rounds: bool = False
) -> Exchange[bytes]:
    """Return a rank's exchange, to count its bytes; in_rounds: `Method.in_rounds`."""
    collective = Nobody(sum(nodes.sizes), NO_ARRAYS).collective(rank)
    if kind in ("sharded", "reduce"):
        made = _Sharded(collective, nodes)
        return ReduceExchange(made) if in_rounds else made
    return make_exchange(kind, collective, nodes, in_rounds=in_rounds)


class _Sharded(ShardedExchange[bytes]):
    """A sharded exchange whose plans count bytes only."""

    def _shard(self, bucket: BucketPlan) -> ShardedPlan:
        return owners.shard(bucket, self.ranks)


class _AsRank(HierarchicalExchange[bytes]):
    """A rank's hierarchical exchange; ranks share what their first one has computed."""

    def __init__(self, nodes: Nodes, rank: int, first: _AsRank | None) -> None:
        collective = Nobody(sum(nodes.sizes), NO_ARRAYS).collective(rank)
        super().__init__(collective, Groups(nodes, rank, None, None))
        self._owners: dict[bytes, tuple[list[int], list[int]]] = {}  # by the plan's digest
        if first is not None:
            self._plans, self._owners = first._plans, first._owners

    def _by_owner(self, plan: Plan) -> tuple[list[int], list[int]]:
        if plan.digest not in self._owners:
            self._owners[plan.digest] = super()._by_owner(plan)
        return self._owners[plan.digest]

    def _shard(self, bucket: BucketPlan) -> NodePlan:
        return owners.shard_sums(bucket, self.groups.nodes)


@dataclass(frozen=True)
class Busiest:
    """The largest bytes of any rank in a step; each figure is for the rank with the most."""

    payload_bytes: int  # passed to collectives by rank 0
    sent_bytes: int
    local_bytes: int  # sent to other ranks on its node, or received from them, the larger one
    added_bytes: int  # added up by an owner of shards of a node's sum
    node_bytes: int  # bytes that leave the busiest node


class Ranks:
    """The ranks that may send the most in an exchange.

    In a hierarchical exchange a rank without shards sends its whole gradient, and an owner a part
    of it. In other exchanges all ranks send the same, and rank 0, whose node is one of the
    largest, sends as much within its node as any.
    """

    def __init__(self, kind: str, nodes: Nodes, *, in_rounds: bool = False) -> None:
        self._nodes = nodes
        self._exchanges = [exchange_of(kind, nodes, in_rounds=in_rounds)]
        if kind == "hierarchical":
            firsts = {len(node): node for node in reversed(nodes.ranks)}
            ranks = sorted(rank for node in firsts.values() for rank in node)
            first = _AsRank(nodes, ranks[0], None)
            self._exchanges = [first, *(_AsRank(nodes, rank, first) for rank in ranks[1:])]

    def busiest(self, plan: Plan) -> Busiest:
        """Return the largest bytes of any rank in a step."""
        first, *_ = each = [exchange.traffic(plan) for exchange in self._exchanges]
        shared = max(self._nodes.sizes) > 1
        within = [one.sent_bytes - (one.between_bytes or 0) for one in each if shared]
        got, added = zip(*(_got(exchange, plan) for exchange in self._exchanges), strict=True)
        return Busiest(
            first.payload_bytes,
            max(one.sent_bytes for one in each),
            max((*within, *got)),
            max(added),
            first.node_bytes or 0,
        )

    def decoded(self, bucket: BucketPlan) -> int:
        """Number of entries of a bucket that every rank decodes in the end."""
        exchange = self._exchanges[0]
        if isinstance(exchange, ShardedExchange):
            return sum(each.entries for each in exchange.sharded(bucket).back)  # at `gather_ratio`
        if isinstance(exchange, HierarchicalExchange):
            sums = exchange.sharded(bucket).sums
            return len(self._nodes.ranks) * sum(each.entries for each in sums)
        return exchange.ranks * bucket.entries


def cheapest(plan: Plan, nodes: Nodes) -> tuple[str, Ranks]:
    """The exchange in a plan's settings, or for "auto" the one with the fewest bytes between nodes.

    Also returns the ranks that may send the most in it.
    """
    asked, in_rounds = plan.config.exchange, plan.config.in_rounds
    kinds = [kind for kind in plan.config.exchanges if kind not in ("auto", "allreduce")]
    kinds = kinds if asked == "auto" else [asked]
    ranks = {kind: Ranks(kind, nodes, in_rounds=in_rounds) for kind in kinds}
    sent = {kind: each.busiest(plan).node_bytes for kind, each in ranks.items()}
    kind = fewest(sent)
    return kind, ranks[kind]


def _got(exchange: Exchange[bytes], plan: Plan) -> tuple[int, int]:
    """Bytes that a rank of a hierarchical exchange receives within its node, and that it adds up.

    It receives a shard from each other rank, if it is an owner, and each other owner's payloads.
    """
    if not isinstance(exchange, HierarchicalExchange) or exchange.groups.size == 1:
        return 0, 0
    groups, nodes = exchange.groups, exchange.groups.nodes
    sums = [each for bucket in plan.buckets for each in exchange.owned(bucket)]
    shard = sum(each.numel * WIDTH[each.residual_dtype] for each in sums)
    gathered = len(nodes.ranks) * sum(exchange.sharded(each).sum_bytes for each in plan.buckets)
    added = (groups.size - 1) * shard
    return added + (nodes.owners - (groups.shard is not None)) * gathered, added
