"""Numbers that ranks tell each other before they encode: who is told what, and what goes wrong."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
from oracle.backends import NUMPY, Backend
from oracle.world import Gradients, World, drawn, same_bits

from horovod_topk.core.exchange.announcing import announced_bytes
from horovod_topk.core.plan.buckets import TensorSpec, make_plan
from horovod_topk.core.plan.shards import shard
from horovod_topk.errors import PayloadError
from horovod_topk.methods.protocol import AnnouncingCodec, Context, Piece
from horovod_topk.ops import Ops, coding

RANKS = 4  # two nodes of two
EXCHANGES = ("allgather", "sharded", "hierarchical")
SPECS = [
    TensorSpec("w", (50, 60), "float32"),  # has blocks of all owners
    TensorSpec("few", (5,), "float32"),  # travels whole
    TensorSpec("none", (0,), "float32"),
    TensorSpec("v", (40, 30), "float32"),
]
each_exchange = pytest.mark.parametrize("exchange", EXCHANGES)


@dataclass(frozen=True, kw_only=True)
class Shifted(AnnouncingCodec):
    """Every element as a float16, less the sum of what ranks announce: their first elements.

    Each rank announces the first element of its piece twice.
    """

    id: ClassVar[int] = 249
    heard: ClassVar[list[tuple[int, list[float], list[list[float]]]]] = []

    def data_bytes(self, piece: Piece) -> int:
        return 4 + coding.value_bytes("float16", piece.numel)

    def numbers(self, piece: Piece) -> int:
        return 2

    def announce(self, ops: Ops[Any], piece: Piece, values: Any) -> Any:
        first = ops.finite(ops.view(values, 0, 1))
        return ops.joined([first, first])

    def pack(self, ops: Ops[Any], piece: Piece, values: Any, context: Context[Any]) -> Any:
        announced = context.announced
        assert announced is not None
        assert context.key is None
        if isinstance(announced.rows, np.ndarray):
            self.heard.append((piece.numel, announced.own.tolist(), announced.rows.tolist()))
        shift = ops.zeros(2, "float32", "cpu")
        ops.accumulate(shift, None, announced.rows)
        shift = ops.view(shift, 1, 2)
        rest = ops.cast(values, "float32") - ops.spread(shift, piece.numel, piece.numel)
        return ops.joined([ops.pack_values(shift, "float32"), ops.pack_values(rest, "float16")])

    def unpack(
        self, ops: Ops[Any], piece: Piece, rows: Any, dtype: str, context: Context[Any]
    ) -> Any:
        shift = ops.unpack_values(ops.columns(rows, 0, 4), 1, "float32", "float32")
        rest = ops.columns(rows, 4, None)
        rest = ops.unpack_values(rest, piece.numel, "float16", "float32")
        return ops.cast(rest + ops.spread(shift, piece.numel, piece.numel), dtype)


def world_of(exchange: str, backend: Backend = NUMPY, **settings: Any) -> World:
    return World(make_plan(SPECS, Shifted(exchange=exchange, **settings)), RANKS, backend)


def gradients(step: int) -> list[Gradients]:
    return drawn(SPECS, RANKS, step)


def told(numel: int) -> list[tuple[list[float], list[list[float]]]]:
    """Own numbers and all rows, of each piece of so many elements, in the order of encoding."""
    return [(own, rows) for size, own, rows in Shifted.heard if size == numel]


# Who is told what.


def test_all_ranks_are_told_the_numbers_of_all_in_rank_order() -> None:
    Shifted.heard.clear()
    given = gradients(0)
    world_of("allgather").step(given)
    for spec in (SPECS[0], SPECS[3]):
        firsts = [float(one[spec.name].flat[0]) for one in given]
        expected = [([first] * 2, [[each] * 2 for each in firsts]) for first in firsts]
        assert told(spec.numel) == expected


def test_ranks_are_told_numbers_of_shards_and_an_owner_its_own_alone() -> None:
    Shifted.heard.clear()
    given, world = gradients(0), world_of("sharded")
    world.step(given)
    (bucket,) = world.plan.buckets
    for plan in shard(bucket, RANKS).scatter:
        for piece in plan.tensors:
            if piece.numel and not piece.whole:
                at = NUMPY.ops.global_index(np.arange(1), RANKS, piece.first)
                firsts = [float(np.ravel(one[piece.spec.name])[at][0]) for one in given]
                rows = [[each] * 2 for each in firsts]
                for first in firsts:
                    assert ([first] * 2, rows) in told(piece.numel)
    back = [(own, rows) for _, own, rows in Shifted.heard if len(rows) == 1]
    assert len(back) == sum(bool(p.numel and not p.whole) for p in _shards(world))
    assert all(rows == [own] for own, rows in back)


def _shards(world: World) -> list[Piece]:
    (bucket,) = world.plan.buckets
    return [piece for plan in shard(bucket, RANKS).back for piece in plan.tensors]


def test_owners_of_the_same_shards_tell_each_other_between_nodes() -> None:
    Shifted.heard.clear()
    given, world = gradients(0), world_of("hierarchical")
    world.step(given)
    sums = [sum(one["w"].flat[0] for one in given[node : node + 2]) for node in (0, 2)]
    pairs = [rows for _, _, rows in Shifted.heard if len(rows) == 2]
    assert len(pairs) == len(Shifted.heard) == 2 * 4  # nodes; owners of shards of w and of v
    assert [[pytest.approx(each)] * 2 for each in sums] in pairs


# What travels.


@each_exchange
def test_bytes_are_those_that_are_counted(exchange: str) -> None:
    world = world_of(exchange)
    world.step(gradients(0))
    for rank, compressor in enumerate(world.ranks):
        sizes = [len(data) for _, data in world.payloads(rank)]
        assert compressor.traffic().payload_bytes == sum(sizes)
        names = [name for name, _ in world.payloads(rank)]
        assert names.count("job.0.0.announce") == 1


@each_exchange
def test_what_travels_whole_is_not_announced(exchange: str) -> None:
    world = world_of(exchange, warmup=((1, 1.0),))
    world.step(gradients(0))  # dense
    assert not any("announce" in name for name, _ in world.payloads(0))
    world.step(gradients(1))
    assert any("announce" in name for name, _ in world.payloads(0))
    dense = make_plan(SPECS[1:3], Shifted(min_numel=8))
    assert [announced_bytes([bucket]) for bucket in dense.buckets] == [0]


def test_announcements_of_all_buckets_are_under_way_together() -> None:
    specs = [SPECS[0], replace(SPECS[3], dtype="float64")]
    world = World(make_plan(specs, Shifted()), RANKS, NUMPY)
    world.step(drawn(specs, RANKS, 0))
    sent = [name.removeprefix("job.0.") for name, _ in world.payloads(0)]
    assert sent == ["0.announce", "1.announce", "0", "1"]


@each_exchange
def test_momentum_is_corrected_before_it_is_announced(exchange: str) -> None:
    if exchange == "hierarchical":
        return  # it knows no momentum
    world, given = world_of(exchange, momentum=0.5), gradients(0)
    world.step(given)
    Shifted.heard.clear()
    before = [one["w"].flat[0] for one in world.residuals()]
    world.step(given)
    expected = [pytest.approx(e + 1.5 * g["w"].flat[0]) for e, g in zip(before, given, strict=True)]
    assert [[each] * 2 for each in expected] in [rows for _, _, rows in Shifted.heard]


# A rank that fails.


@each_exchange
@pytest.mark.parametrize("before_it", range(4))
def test_a_rank_that_abandons_a_step_ends_it_for_all(exchange: str, before_it: int) -> None:
    world, other = world_of(exchange), world_of(exchange)
    stages = world.ranks[0].step.stages
    assert stages == {"allgather": 1, "sharded": 2, "hierarchical": 3}[exchange]
    if before_it > stages or (exchange, before_it) == ("hierarchical", 2):
        return  # there a rank waits for the others of its node, which needs threads
    for each in (world, other):
        each.step(gradients(0))
    before = world.kept()
    world.launch(gradients(1))
    for _ in range(before_it):
        world.advance()
    world.ranks[1].abandon()
    applied = world.end([0, 2, 3], stages - before_it)
    if before_it < stages:
        assert any(np.isnan(each).all() for each in applied)
    assert world.kept() == before
    assert same_bits(world.step(gradients(2)), other.step(gradients(2)))
    assert world.kept() == other.kept()


@each_exchange
def test_a_damaged_announcement_is_refused_and_the_others_are_told(exchange: str) -> None:
    world, other = world_of(exchange), world_of(exchange)
    for each in (world, other):
        each.step(gradients(0))
    before, stages = world.kept(), world.ranks[0].step.stages
    world.launch(gradients(1))
    if exchange == "hierarchical":
        world.advance()
    networks = [world.network, *world.network.groups.values()]
    for network in networks:
        for (name, _), posted in network._posted.items():
            if name.endswith("announce"):
                posted[0][:] = 0
    for compressor in world.ranks:
        with pytest.raises(PayloadError, match="do not open a payload"):
            compressor.step.advance()
    for compressor in world.ranks:
        for _ in range(stages):
            compressor.step.advance()
        compressor.abandon()
    assert world.kept() == before
    assert same_bits(world.step(gradients(2)), other.step(gradients(2)))
