"""Strategies to compare: what each computes and sends for each piece of the gradients."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from horovod_topk.config import EXCHANGES
from horovod_topk.core.plan.buckets import BucketPlan, Plan, TensorSpec, make_plan
from horovod_topk.core.plan.nodes import Nodes
from horovod_topk.cost.collective_cost import CollectiveCost, negotiation, ring_allreduce
from horovod_topk.cost.traffic import Ranks, cheapest
from horovod_topk.methods.protocol import Method, Rounds, UpdateRule, numbers_of
from horovod_topk.methods.topk import VALUES, TopK

FLOAT, HALF = 4, 2  # bytes
LEAST_SAVING = 2  # factor: `min_compression_rate` of PyTorch's hook for PowerSGD
CORRECTION = 1.6  # triads per element of momentum correction: docs/results/kernels.json
# Triads per element of adapting an optimizer's steps, before sending and after receiving: what
# docs/kernels.md has more than for plain error feedback and the optimizer's dense step, of AdamW
# PyTorch's fused one. That SGD's update is faster than its dense step is not counted.
ADAPTED = {"sgd": (0.0, 0.2), "adam": (1.0, 1.1)}


@dataclass(frozen=True)
class Work:
    """Amounts of computation beside the model, in the units of `Kernels`."""

    encoded: float = 0  # elements
    cleared: float = 0  # elements
    decoded: float = 0  # entries
    multiplied: float = 0  # multiply-adds
    triads: float = 0  # elements


@dataclass(frozen=True)
class Multiples:
    """A method's computation for each element, in triads."""

    encode: float  # to compensate, encode and update residuals; for methods of rounds, all of it
    decode: float = 0.0  # for each received payload


@dataclass(frozen=True)
class Piece:
    """Gradients that are exchanged together."""

    elements: int
    before: Work  # work before it is sent
    collective: CollectiveCost
    after: Work  # work after it is received; for a sharded exchange also the owners' work
    fusion_bytes: int | None = None  # bytes in Horovod's fusion buffer; None: never fused


@dataclass(frozen=True)
class Strategy:
    """One exchange of all gradients of a model."""

    exchange: str
    values: str
    pieces: tuple[Piece, ...]
    sent_bytes: int  # bytes that a rank sends in a step
    node_bytes: int  # bytes that leave the busiest node in a step
    ours: bool = False

    @property
    def name(self) -> str:
        """The name in tables."""
        return f"{self.exchange} {self.values}"

    def collectives(self, limit: int) -> list[tuple[range, CollectiveCost]]:
        """The collectives of a step that fuses at most `limit` bytes: pieces and cost of each."""
        if limit not in self._fused:
            each = [piece.collective for piece in self.pieces]
            self._fused[limit] = [
                (group, functools.reduce(CollectiveCost.fused, each[group.start : group.stop]))
                for group in _groups(self.pieces, limit)
            ]
        return self._fused[limit]

    @cached_property
    def _fused(self) -> dict[int, list[tuple[range, CollectiveCost]]]:
        """What `collectives` has computed, by its limit."""
        return {}


def _groups(pieces: Sequence[Piece], limit: int) -> Iterator[range]:
    """Positions of pieces that are sent in one collective, in order."""
    first, room = 0, 0
    for position, piece in enumerate(pieces):
        size = piece.fusion_bytes
        if position and (size is None or size > room):
            yield range(first, position)
            first = position
        if first == position:
            room = limit
        room -= limit if size is None else size
    yield range(first, len(pieces))


def dense(specs: Sequence[TensorSpec], nodes: Nodes) -> Strategy:
    """Return the strategy of Horovod's allreduce of each tensor, as tensors become ready."""
    return _whole("float32", FLOAT, specs, nodes)


def half(specs: Sequence[TensorSpec], nodes: Nodes) -> Strategy:
    """Return the strategy of Horovod's fp16 compression; a cast takes about as long as a triad."""
    return _whole("float16", HALF, specs, nodes)


def _whole(values: str, width: int, specs: Sequence[TensorSpec], nodes: Nodes) -> Strategy:
    pieces = []
    for spec in specs:
        cast = Work(triads=spec.numel if width == HALF else 0)
        size = width * spec.numel
        pieces.append(Piece(spec.numel, cast, ring_allreduce(size, nodes), cast, size))
    total = ring_allreduce(width * sum(spec.numel for spec in specs), nodes)
    return Strategy("allreduce", values, tuple(pieces), total.sent_bytes, total.network_bytes)


def low_rank(specs: Sequence[TensorSpec], nodes: Nodes, rank: int) -> Strategy:
    """Return the strategy of PowerSGD, in buckets as large as ours, with three allreduces each.

    A gradient of n x m is sent as P (n x r) and Q (m x r), one after the other. As in PyTorch's
    hook, n is the first dimension and m the product of the others; vectors, and matrices whose
    factors save less than half, are sent whole, by the third allreduce.
    """
    plan = make_plan(specs, TopK())
    pieces = []
    for bucket in plan.buckets:
        elements = multiplied = 0  # those that are allreduced; M Q, M^T P, P Q^T and Gram-Schmidt
        for shape in (tensor.spec.shape for tensor in bucket.tensors):
            n, m = shape[0] if shape else 1, math.prod(shape[1:])
            r = min(rank, n, m)
            if len(shape) > 1 and (n + m) * r * LEAST_SAVING < n * m:
                elements += (n + m) * r
                multiplied += 3 * n * m * r + n * r**2
            else:
                elements += n * m
        before = Work(multiplied=multiplied, triads=2 * bucket.numel)
        collective = ring_allreduce(FLOAT * elements, nodes)
        three = replace(collective, collectives=3, rounds=3 * collective.rounds)
        pieces.append(Piece(bucket.numel, before, three, Work()))
    sent = sum(piece.collective.sent_bytes for piece in pieces)
    leaving = sum(piece.collective.network_bytes for piece in pieces)
    return Strategy("PowerSGD", f"rank {rank}", tuple(pieces), sent, leaving)


def compressed(
    specs: Sequence[TensorSpec],
    nodes: Nodes,
    kind: str,
    config: TopK,
    update_rule: UpdateRule | None = None,
) -> Strategy:
    """Return a strategy of one of our exchanges, with the bytes of the rank that sends most."""
    plan, ranks = make_plan(specs, config, update_rule=update_rule), Ranks(kind, nodes)
    pieces = tuple(_piece(plan, bucket, kind, ranks, nodes) for bucket in plan.buckets)
    whole = ranks.busiest(plan)  # one rank; in two buckets two ranks may send most
    return Strategy(kind, config.values, pieces, whole.sent_bytes, whole.node_bytes, ours=True)


def all_strategies(
    specs: Sequence[TensorSpec],
    nodes: Nodes,
    config: TopK,
    *,
    rank: int,
    values: Iterable[str] = VALUES,
    update_rule: UpdateRule | None = None,
) -> list[Strategy]:
    """Return dense, fp16, PowerSGD, and each of our exchanges with each format of values."""
    strategies = [dense(specs, nodes), half(specs, nodes), low_rank(specs, nodes, rank)]
    kinds = [kind for kind in EXCHANGES if kind != "auto"]
    adapts = config.momentum or update_rule is not None
    if max(nodes.sizes) == 1 or adapts:  # equals the allgather, or is refused or does not adapt
        kinds.remove("hierarchical")
    listed = list(values)
    for kind in kinds:
        strategies += [
            compressed(specs, nodes, kind, replace(config, values=each), update_rule)
            for each in listed
        ]
    return strategies


def of_method(
    specs: Sequence[TensorSpec], nodes: Nodes, config: Method, name: str, multiples: Multiples
) -> Strategy:
    """Return the strategy of any method over the exchange in its settings; "auto": the cheapest."""
    plan = make_plan(specs, config)
    kind, ranks = cheapest(plan, nodes)
    pieces = []
    for bucket in plan.buckets:
        piece = _piece(plan, bucket, kind, ranks, nodes)
        work = _work_of(kind, bucket.numel, multiples, nodes)
        pieces.append(replace(piece, before=work[0], after=work[1]))
    whole = ranks.busiest(plan)
    return Strategy(kind, name, tuple(pieces), whole.sent_bytes, whole.node_bytes)


def _work_of(kind: str, numel: int, multiples: Multiples, nodes: Nodes) -> tuple[Work, Work]:
    """As `_work`, for a method whose kernels take multiples of triads."""
    encode, decode = multiples.encode * numel, multiples.decode * numel
    ranks, held = sum(nodes.sizes), len(nodes.ranks)
    if kind == "allgather":
        return Work(triads=encode), Work(triads=numel + ranks * decode)
    if kind == "sharded":
        return Work(triads=encode), Work(triads=encode / ranks + 2 * (numel + decode))
    if kind == "hierarchical":
        own = encode / nodes.owners
        return Work(triads=numel), Work(triads=own + numel + held * decode)
    return Work(triads=encode / 2), Work(triads=encode / 2)


def _piece(plan: Plan, bucket: BucketPlan, kind: str, ranks: Ranks, nodes: Nodes) -> Piece:
    """The piece of one bucket, from the traffic of a plan with this bucket only."""
    most = ranks.busiest(replace(plan, buckets=(bucket,)))
    collectives, rounds = _messages(kind, nodes, bucket)
    before, after = _work(kind, bucket, ranks.decoded(bucket), nodes)
    collective = CollectiveCost(
        collectives,
        rounds,
        most.node_bytes,
        most.local_bytes,
        most.sent_bytes,
        most.added_bytes,
        ring=kind != "hierarchical",
    )
    gathered = sum(nodes.sizes) * most.payload_bytes if kind == "allgather" else None
    return Piece(bucket.numel, before, collective, after, gathered)


def _messages(kind: str, nodes: Nodes, bucket: BucketPlan | None = None) -> tuple[int, int]:
    """Number of collectives, and of messages that wait for one another.

    An allgather is a ring of P - 1 messages, an alltoall P - 1 messages to other ranks, after as
    many with their lengths (Gloo's allgatherv.cc and alltoallv.cc, Horovod's
    `AlltoallGetRecvSplits`). Each collective is negotiated. Announcements before encoding take
    another allgather.

    bucket: the bucket, whose method may have rounds or announcements; None: it has neither.
    """
    ranks, size, held = sum(nodes.sizes), max(nodes.sizes), len(nodes.ranks)
    gather, scatter = ranks - 1, 2 * (ranks - 1)
    announces = bucket is not None and any(numbers_of(bucket.config, t) for t in bucket.tensors)
    method: object = None if bucket is None else bucket.config
    rounds = method.rounds if isinstance(method, Rounds) else 1
    if kind == "allgather":
        return rounds + announces, (rounds + announces) * (gather + negotiation(ranks))
    if kind == "allreduce":
        return rounds, rounds * (2 * gather + negotiation(ranks))
    sharded = 2, scatter + gather + 2 * negotiation(ranks)
    if kind in ("sharded", "reduce"):
        announced = announces * (gather + negotiation(ranks))
        return rounds * sharded[0] + announces, rounds * sharded[1] + announced
    within = 2 * (size - 1) + (size - 1) + 2 * negotiation(size)  # an alltoall, an allgather
    between = held - 1 + negotiation(held) if held > 1 else 0
    return (3 + announces if held > 1 else 2), within + (1 + announces) * between


def _work(kind: str, bucket: BucketPlan, decoded: int, nodes: Nodes) -> tuple[Work, Work]:
    """Work before a bucket is sent, and after, when every rank decodes `decoded` entries.

    Sharded: an owner sums the received entries of its P-th of the elements, and selects from them.
    Hierarchical: an owner selects only from its share of its node's sum.
    """
    numel = bucket.numel
    rule = "" if bucket.update_rule is None else bucket.update_rule.name
    earlier, later = ADAPTED.get(rule, (0.0, 0.0))
    earlier += CORRECTION if bucket.config.momentum else 0.0
    selection, adapting = Work(encoded=numel, triads=earlier * numel), later * numel
    if kind == "allgather":
        return selection, Work(cleared=numel, decoded=decoded, triads=adapting)
    if kind == "sharded":
        own = numel / sum(nodes.sizes)
        after = Work(own, numel + own, bucket.entries + decoded, triads=adapting)
        return selection, after
    return Work(triads=numel), Work(numel / nodes.owners, numel, decoded)
