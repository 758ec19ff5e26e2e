"""Exchange selection: the exchange that a setting names, or that `exchange="auto"` selects."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from horovod_topk.core.exchange.agreement import gather_bytes
from horovod_topk.core.exchange.allgather import Allgather
from horovod_topk.core.exchange.allreduce import AllreduceExchange
from horovod_topk.core.exchange.hierarchical import Groups, HierarchicalExchange
from horovod_topk.core.exchange.membership import elastic
from horovod_topk.core.exchange.protocol import Collective, Exchange
from horovod_topk.core.exchange.reduce import ReduceExchange
from horovod_topk.core.exchange.sharded import ShardedExchange
from horovod_topk.core.plan.buckets import Plan
from horovod_topk.core.plan.nodes import Location, Nodes, nodes_of
from horovod_topk.errors import ConfigError
from horovod_topk.ops import Ops

Array = TypeVar("Array")

SECOND_SELECTION = (
    "; owners select a second time, which costs accuracy: docs/methods.md, at the same ratio"
)
_OVER_ALL: dict[str, Callable[..., Exchange[Any]]] = {  # exchanges over one collective, by name
    "allgather": Allgather,
    "sharded": ShardedExchange,
    "reduce": ShardedExchange,
    "allreduce": AllreduceExchange,
}
_LOCATION = struct.Struct("<8sqq")  # a digest of `Location.host`, and the rest


def exchange_of(plan: Plan, ops: Ops[Array], collective: Collective[Array]) -> Exchange[Array]:
    """Make the exchange that a plan's settings name.

    A collective for "hierarchical" and "auto", which depend on nodes.

    Raises:
        ConfigError: on every rank, if it needs groups of ranks that cannot be made.
    """
    kind, because = plan.config.exchange, ""
    if kind == "auto" and elastic():  # ranks that join late construct it alone
        kind, because = "allgather", "the job is elastic, and an allgather has no owners"
    if kind in _OVER_ALL:
        in_rounds = plan.config.in_rounds
        return make_exchange(kind, collective, because=because, in_rounds=in_rounds)
    nodes = find_nodes(ops, collective)
    unable = first_unable(nodes.groups, ops, collective)
    if kind == "auto":
        kind, because = choose(plan, collective, nodes, can_split=unable is None)
    elif unable is not None:
        raise ConfigError(
            f"exchange='hierarchical' exchanges among ranks such as {list(nodes.groups[0])}, for "
            f"which there is no process set, and rank {unable} cannot add one",
            cure="Call hvd.init(process_sets='dynamic') or set HOROVOD_DYNAMIC_PROCESS_SETS=1, on "
            "every rank; an optimizer of a process set needs them added by hvd.add_process_set on "
            "all ranks beforehand",
        )
    return make_exchange(kind, collective, nodes, because)


def make_exchange(
    kind: str,
    collective: Collective[Array],
    nodes: Nodes | None = None,
    because: str = "",
    *,
    in_rounds: bool = False,
) -> Exchange[Array]:
    """Make an exchange by its name.

    nodes: the ranks of each node; required for "hierarchical".
    """
    if kind in _OVER_ALL:
        made = _OVER_ALL[kind](collective, nodes, because)
        return ReduceExchange(made) if in_rounds else made
    assert nodes is not None
    groups = Groups.of(collective, nodes)
    return HierarchicalExchange(collective, groups, because or _reduced_to(nodes))


def dense_beside(exchange: Exchange[Array]) -> Exchange[Array]:
    """The exchange of dense gradients where another one carries payloads.

    An allgather of dense gradients sends P / 2 times the bytes of an allreduce, and holds those of
    all ranks. Beyond two ranks owners add them up instead, in rank order; residuals stay where they
    are. Elastic jobs stay with the allgather, as ranks that join see another number of ranks.
    """
    if not isinstance(exchange, Allgather) or exchange.ranks < 3 or elastic():
        return exchange
    owners = ShardedExchange(exchange.collective, exchange.nodes, "gradients are dense")
    return ReduceExchange(owners)


def choose(
    plan: Plan, collective: Collective[Array], nodes: Nodes, *, can_split: bool
) -> tuple[str, str]:
    """The exchange that `exchange="auto"` selects, and the reason in one line.

    It is the exchange with the fewest bytes a step that leave the busiest node. In the order
    allgather, sharded, hierarchical, a later one has to save a tenth of the bytes of the best one
    before, since it has more collectives, and selects more often or sums dense gradients.
    Hierarchical is a candidate if there are several nodes, some node has more than one rank, and
    Horovod can add process sets; not with momentum correction, nor where Adam's steps depend on
    arrivals: both need to know what each rank has sent. At the same ratio, a second selection
    leaves out more than an allgather does: the reason says so.
    """
    groups: Groups[Array] = Groups(nodes, collective.rank, None, None)
    ways: list[Exchange[Array]] = [Allgather(collective, nodes), ShardedExchange(collective, nodes)]
    several = len(nodes.ranks) > 1 and max(nodes.sizes) > 1
    several &= not (plan.config.momentum or plan.update_rule is not None)
    if several and can_split:
        ways.append(HierarchicalExchange(collective, groups))
    cost = {way.kind: way.traffic(plan).node_bytes or 0 for way in ways}
    best = fewest(cost)
    if len(nodes.ranks) == 1:
        return best, "one node: nothing travels between nodes"
    listed = ", ".join(f"{kind} {node_bytes:,}" for kind, node_bytes in cost.items())
    cure = " (hierarchical needs hvd.init(process_sets='dynamic'))"
    missing = cure if several and not can_split else ""
    price = SECOND_SELECTION if best == "sharded" else ""
    return best, f"bytes a step that leave the busiest node: {listed}{missing}{price}"


def check_owners(exchanges: Sequence[Exchange[Any]]) -> None:
    """Refuse optimizers whose residuals belong to different owners: a state dict has one kind."""
    kinds = {str(each.owner): each.kind for each in exchanges if each.parts}
    if len(kinds) > 1:
        raise ConfigError(
            f"exchange='auto' selects {' and '.join(kinds.values())} for optimizers of one model",
            cure="Name the exchange, such as exchange='sharded'",
        )


def fewest(cost: Mapping[str, int]) -> str:
    """The exchange that `choose` selects, given bytes by kind in its order."""
    best, *others = cost
    for kind in others:
        if 10 * cost[kind] < 9 * cost[best]:
            best = kind
    return best


def _reduced_to(nodes: Nodes) -> str:
    """The reason to log where the hierarchical exchange has a single level."""
    if len(nodes.ranks) == 1:
        return "one node: gradients are added up dense, and nothing travels between nodes"
    if max(nodes.sizes) == 1:
        return "no node has more than one rank: an allgather"
    return ""


def find_nodes(ops: Ops[Array], collective: Collective[Array]) -> Nodes:
    """Find the nodes of all ranks. A collective."""
    here = collective.location
    host = hashlib.sha256(here.host.encode()).digest()[:8]
    record = _LOCATION.pack(host, here.local_rank, here.first)
    gathered = gather_bytes(record, "topkef.nodes", ops, collective)
    records = [_LOCATION.unpack(data) for data in gathered]
    return nodes_of([Location(host.hex(), local, first) for host, local, first in records])


def first_unable(
    groups: Sequence[Sequence[int]], ops: Ops[Array], collective: Collective[Array]
) -> int | None:
    """The first rank that cannot make these groups, or None. A collective."""
    able = bytes([collective.can_split(groups)])
    answers = gather_bytes(able, "topkef.groups", ops, collective)
    return next((rank for rank, answer in enumerate(answers) if answer != b"\1"), None)
