"""What a step costs: each formula by hand, and the laws that any of them has to keep."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from horovod_topk.cli.models import specs_of
from horovod_topk.core.exchange.announcing import announced_bytes
from horovod_topk.core.plan import shards
from horovod_topk.core.plan.buckets import TensorSpec, make_plan
from horovod_topk.core.plan.nodes import Nodes
from horovod_topk.cost import machine as machines
from horovod_topk.cost import owners
from horovod_topk.cost.collective_cost import HEADERS, CollectiveCost, ring_allreduce
from horovod_topk.cost.crossover import Span, faster, written
from horovod_topk.cost.fit import Sample, fit, least_squares
from horovod_topk.cost.machine import Kernels, Machine, Network
from horovod_topk.cost.quantities import bits_per_second, milliseconds, rate, seconds
from horovod_topk.cost.step import Training, step
from horovod_topk.cost.strategies import (
    Multiples,
    Piece,
    Strategy,
    Work,
    all_strategies,
    compressed,
    dense,
    low_rank,
    of_method,
)
from horovod_topk.cost.traffic import exchange_of, nodes_of
from horovod_topk.cost.verdict import judge, rows
from horovod_topk.methods import Dense, PowerSGD, TernGrad
from horovod_topk.methods.topk import TopK

pytestmark = pytest.mark.tools

NOTHING = Kernels(0.0, 0.0, 0.0, 0.0, 0.0)
KERNELS = Kernels(encode=5e-10, clear=2e-10, decode=3e-9, multiply=2e-10, triad=3e-10)
NETWORK = Network(bandwidth=1e9, latency=5e-5, overhead=1e-3)
MACHINE = Machine(NETWORK, KERNELS)
APART, TOGETHER = nodes_of(8, 1), nodes_of(8, 4)
SPECS = specs_of("resnet18")
CONFIG = TopK(ratio=0.01, values="float32")
ONE = [TensorSpec("w", (10_000,), "float32")]
TRAINING = Training(compute=0.0625)


def machine(bandwidth: float) -> Machine:
    return replace(MACHINE, network=replace(NETWORK, bandwidth=bandwidth))


def listed(nodes: Nodes, *values: str) -> list[Strategy]:
    """Dense, fp16, PowerSGD, and each of our exchanges with these formats."""
    return all_strategies(SPECS, nodes, CONFIG, rank=4, values=values)


# Collectives


def test_a_ring_allreduce_by_hand() -> None:
    """8 ranks, 8 MB: 14 MB sent in 14 messages, and 14 more that negotiate; 7 MB are added."""
    collective = ring_allreduce(8_000_000, APART)
    assert collective == CollectiveCost(1, 28, 14_000_000, 0, 14_000_000, 7_000_000)
    network = Network(1e9, latency=1e-4, overhead=2e-3, copy=1e-9, add=2e-9)
    by_hand = 0.002 + 0.0028 + 0.112 * (1 + 66 / 1448) + 0.014 + 0.014
    assert collective.seconds(network) == pytest.approx(by_hand)
    assert collective.seconds(network, slowdown=3) == pytest.approx(by_hand + 2 * 0.028)


def test_nodes_of_several_ranks_share_their_card() -> None:
    """A ring leaves each node once, and passes the other ranks within it meanwhile."""
    collective = ring_allreduce(8_000_000, TOGETHER)
    assert (collective.network_bytes, collective.local_bytes) == (14_000_000, 14_000_000)
    slow_inside = Network(1e9, 0.0, 0.0, local_bandwidth=5e8)
    assert collective.seconds(slow_inside) == pytest.approx(8 * 14e6 / 5e8)
    assert ring_allreduce(8_000_000, nodes_of(4, 4)).network_bytes == 0


def test_legs_of_a_hierarchical_exchange_follow_each_other() -> None:
    network = Network(1e9, 0.0, 0.0, local_bandwidth=1e9)
    both = CollectiveCost(3, 0, 1000, 1000, 2000)
    apart = replace(both, ring=False)
    assert apart.seconds(network) == pytest.approx(8e-6 * (1 + HEADERS) + 8e-6)
    assert both.seconds(network) == pytest.approx(8e-6 * (1 + HEADERS))


@pytest.mark.one_in(5)
@pytest.mark.parametrize("kind", ["allgather", "sharded", "hierarchical"])
@pytest.mark.parametrize("nodes", [APART, TOGETHER, nodes_of(4, 4), nodes_of(7, 3)])
@pytest.mark.parametrize("values", ["float32", "int8"])
def test_bytes_are_those_of_traffic(kind: str, nodes: Nodes, values: str) -> None:
    config = TopK(values=values, ratio=0.01)
    strategy, plan = compressed(SPECS, nodes, kind, config), make_plan(SPECS, config)
    each = [exchange_of(kind, nodes, rank).traffic(plan) for rank in range(sum(nodes.sizes))]
    assert strategy.sent_bytes == max(traffic.sent_bytes for traffic in each)
    assert {strategy.node_bytes} == {traffic.node_bytes for traffic in each}


@pytest.mark.parametrize("parts", [2, 3, 7, 33, 300])
@pytest.mark.parametrize("config", [TopK(gather_ratio=0.005, exchange="sharded"), TernGrad()])
def test_owners_of_one_kind_share_a_plan(parts: int, config: TopK | TernGrad) -> None:
    """The bytes and entries of each owner are those of the plan that ranks use."""
    bucket = make_plan(SPECS, config).buckets[-1]
    ours, theirs = owners.shard(bucket, parts), shards.shard(bucket, parts)
    assert ours.scatter_bytes == theirs.scatter_bytes
    assert ours.gather_bytes == theirs.gather_bytes
    assert announced_bytes(ours.scatter) == announced_bytes(theirs.scatter)
    nodes = nodes_of(2 * parts, parts)
    sums, ranks_sums = (each.shard_sums(bucket, nodes).sums for each in (owners, shards))
    for mine, real in ((ours.back, theirs.back), (sums, ranks_sums)):
        assert [each.entries for each in mine] == [each.entries for each in real]
        assert mine[0].layout == real[0].layout
    assert [each.numel for each in sums] == [each.numel for each in ranks_sums]


def test_uneven_nodes_have_few_owners() -> None:
    """7 ranks on nodes of 3, 3 and 1: one owner a node, to whom the others send all they have."""
    collective = compressed(ONE, nodes_of(7, 3), "hierarchical", CONFIG).pieces[0].collective
    exchange = exchange_of("hierarchical", nodes_of(7, 3))
    payload = exchange.sharded(make_plan(ONE, CONFIG).buckets[0]).sum_bytes
    assert collective.sent_bytes == 40_000 + 3 * payload  # the second rank hands on what it has got
    assert collective.added_bytes == 2 * 40_000
    assert collective.local_bytes == 2 * 40_000  # which the owner gets
    assert collective.network_bytes == 2 * payload


def test_owners_of_even_nodes_by_hand() -> None:
    """4 ranks on 2 nodes: an owner sends and gets half of 2048 elements, and hands on its half."""
    specs, config = [TensorSpec("w", (2048,), "float32")], CONFIG
    collective = compressed(specs, nodes_of(4, 2), "hierarchical", config).pieces[0].collective
    exchange = exchange_of("hierarchical", nodes_of(4, 2))
    payload = exchange.sharded(make_plan(specs, config).buckets[0]).sum_bytes
    assert collective.added_bytes == 4 * 1024
    assert collective.local_bytes == 4 * 1024 + 2 * payload
    assert collective.sent_bytes == collective.local_bytes + payload


def test_messages_by_hand() -> None:
    """4 ranks: a ring of 3; an alltoall of 3 and 3 lengths; 6 that negotiate each collective."""
    gather = compressed(ONE, nodes_of(4, 1), "allgather", CONFIG).pieces[0]
    assert (gather.collective.collectives, gather.collective.rounds) == (1, 3 + 6)
    sharded = compressed(ONE, nodes_of(4, 1), "sharded", CONFIG).pieces[0]
    assert (sharded.collective.collectives, sharded.collective.rounds) == (2, 6 + 3 + 12)
    nested = compressed(ONE, nodes_of(4, 2), "hierarchical", CONFIG).pieces[0]
    assert (nested.collective.collectives, nested.collective.rounds) == (3, (2 + 1 + 4) + (1 + 2))


def test_work_by_hand() -> None:
    """10,000 elements at 1%: 100 entries of each of 4 ranks."""
    gather = compressed(ONE, nodes_of(4, 1), "allgather", CONFIG).pieces[0]
    assert (gather.before, gather.after) == (Work(encoded=10_000), Work(0, 10_000, 400))
    sharded = compressed(ONE, nodes_of(4, 1), "sharded", CONFIG).pieces[0]
    back = 3 * 26 + 24  # of shards of 2,560 and 2,320, each rounded up
    assert sharded.after == Work(2_500, 12_500, 100 + back)
    less = compressed(
        ONE, nodes_of(4, 1), "sharded", replace(CONFIG, exchange="sharded", gather_ratio=0.001)
    )
    assert less.pieces[0].after == Work(2_500, 12_500, 100 + 4 * 3)


def test_other_methods_by_hand() -> None:
    """10,000 elements on 4 ranks; TernGrad announces, PowerSGD has two rounds."""
    specs, once = [TensorSpec("w", (100, 100), "float32")], Multiples(10.0, 2.0)
    nodes = nodes_of(4, 1)
    found = of_method(specs, nodes, TernGrad(), "TernGrad", once)
    (piece,) = found.pieces
    assert (found.name, found.ours) == ("allgather TernGrad", False)
    assert (piece.collective.collectives, piece.collective.rounds) == (2, 2 * (3 + 6))
    assert piece.before == Work(triads=100_000)
    assert piece.after == Work(triads=10_000 + 4 * 20_000)
    (piece,) = of_method(specs, nodes, TernGrad(exchange="sharded"), "TernGrad", once).pieces
    assert (piece.collective.collectives, piece.collective.rounds) == (3, 6 + 3 + 12 + 3 + 6)
    assert piece.after == Work(triads=25_000 + 2 * 30_000)
    (piece,) = of_method(specs, nodes, PowerSGD(), "PowerSGD", once).pieces
    assert (piece.collective.collectives, piece.collective.rounds) == (4, 2 * (6 + 3 + 12))
    assert piece.before == piece.after == Work(triads=50_000)
    nested = TernGrad(exchange="hierarchical")
    (piece,) = of_method(specs, nodes_of(4, 2), nested, "TernGrad", once).pieces
    assert (piece.collective.collectives, piece.collective.rounds) == (4, (2 + 1 + 4) + 2 * (1 + 2))
    assert piece.after == Work(triads=50_000 + 10_000 + 2 * 20_000)
    (piece,) = of_method(specs, nodes, Dense(exchange="allreduce"), "Dense", once).pieces
    assert (piece.collective.collectives, piece.collective.rounds) == (1, 6 + 6)


def test_powersgd_by_hand() -> None:
    """Rank 2 of 100 x 60 (as 100 x 6 x 10): P and Q are 320 numbers; 5 x 5 and 7 travel whole."""
    shapes = [(100, 6, 10), (5, 5), (7,), ()]
    specs = [TensorSpec(str(at), shape, "float32") for at, shape in enumerate(shapes)]
    (piece,) = low_rank(specs, nodes_of(2, 1), 2).pieces
    assert piece.collective.sent_bytes == 4 * (2 * 160 + 25 + 7 + 1)
    assert piece.before.multiplied == 3 * 6000 * 2 + 100 * 4
    assert piece.collective.collectives == 3


# Steps


def piece(elements: int, kilobytes: int, fusion_bytes: int | None = None) -> Piece:
    collective = CollectiveCost(1, 0, 0, 1000 * kilobytes, 1000 * kilobytes)
    return Piece(elements, Work(encoded=elements), collective, Work(cleared=elements), fusion_bytes)


def test_a_step_by_hand() -> None:
    """Two pieces of 1 s of encoding, 1 s of decoding and 4 + 1 s on the network; 6 s of compute."""
    network = Network(1.0, 0.0, overhead=1.0, local_bandwidth=8000.0)  # 1 kB/s
    there = Machine(network, Kernels(encode=1.0, clear=1.0, decode=0, multiply=0, triad=0))
    strategy = Strategy("", "", (piece(1, 4), piece(1, 4)), 0, 0)
    training = Training(6.0, forward=1 / 3)
    alone = step(strategy, there, training, overlap=False)
    assert alone.seconds == pytest.approx(6 + 2 + 2 * 5 + 2)
    assert alone.efficiency == pytest.approx(6 / 20)
    assert alone.hidden == pytest.approx(0)
    # ready at 2 + 2 + 1 = 5 and 5 + 2 + 1 = 8; sent until 10 and 15; decoded until 11 and 16
    overlapped = step(strategy, there, training, overlap=True)
    assert overlapped.seconds == pytest.approx(16)
    assert overlapped.hidden == pytest.approx(1 - (16 - 6 - 4) / 10)


def test_what_is_ready_at_once_is_fused() -> None:
    network = Network(1.0, 0.0, overhead=1.0, local_bandwidth=8000.0)
    there = Machine(network, NOTHING)
    training = Training(6.0, forward=1 / 3)

    def exchange(size: int | None, *, overlap: bool) -> float:
        strategy = Strategy("", "", tuple(piece(1, 1, size) for _ in range(3)), 0, 0)
        return step(strategy, there, training, overlap=overlap).exchange

    assert exchange(None, overlap=False) == pytest.approx(3 + 3)
    assert exchange(1000, overlap=False) == pytest.approx(3 + 1)
    assert exchange(100 << 20, overlap=False) == pytest.approx(3 + 3)  # 128 MiB hold one
    # ready at 2 + 4/3, 4 + 2/3 and 6: gone at 5 1/3, 7 1/3 and 9 1/3, or all at 6 + 4
    assert exchange(1000, overlap=True) == pytest.approx(3 + 3)


def test_ranks_that_share_cores_compute_slowly() -> None:
    shared = replace(MACHINE, cores=2)
    assert (shared.slowdown(1), shared.slowdown(8)) == (1.0, 4.0)
    assert replace(shared, crowd=6).slowdown(1) == 3.0
    assert MACHINE.slowdown(8) == 1.0
    strategy = compressed(SPECS, APART, "allgather", CONFIG)
    crowded = replace(shared, crowd=6)
    quick, slow = (step(strategy, m, TRAINING, overlap=False) for m in (MACHINE, crowded))
    assert slow.kernels == pytest.approx(3 * quick.kernels)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("nodes", [APART, TOGETHER])
def test_more_bandwidth_is_never_slower(nodes: Nodes, overlap: bool) -> None:
    for strategy in listed(nodes, "float32", "int4"):
        times = [
            step(strategy, machine(10 ** (6 + i / 4)), TRAINING, overlap=overlap).seconds
            for i in range(25)
        ]
        assert all(a >= b - 1e-12 for a, b in itertools.pairwise(times)), strategy.name
        assert times[-1] >= TRAINING.compute


def test_overlap_never_costs_and_hides_no_more_than_all() -> None:
    for strategy in listed(APART, "float32"):
        alone, overlapped = (step(strategy, MACHINE, TRAINING, overlap=o) for o in (False, True))
        assert 0 <= overlapped.hidden <= 1
        assert overlapped.seconds <= alone.seconds + 1e-12


# Crossings and verdicts


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", ["allgather", "sharded"])
def test_a_crossing_is_one(kind: str, overlap: bool) -> None:
    """At it both take equally long; below it ours is faster, above it dense."""
    other, plain = compressed(SPECS, APART, kind, CONFIG), dense(SPECS, APART)
    (span,) = faster([plain], other, MACHINE, TRAINING, overlap=overlap)
    assert span.above == 0
    assert 1e6 < (at := span.below) < 1e12

    def gain(bandwidth: float) -> float:
        there = machine(bandwidth)
        return (
            step(plain, there, TRAINING, overlap=overlap).seconds
            - step(other, there, TRAINING, overlap=overlap).seconds
        )

    assert gain(at) == pytest.approx(0, abs=1e-6)
    assert gain(at / 1.01) > 0 > gain(at * 1.01)


def test_there_may_be_no_crossing() -> None:
    plain, other = dense(SPECS, APART), compressed(SPECS, APART, "allgather", CONFIG)
    free = replace(MACHINE, kernels=NOTHING)
    assert faster([plain], other, free, TRAINING, overlap=False) == (Span(0.0, math.inf),)
    assert faster([plain], plain, free, TRAINING, overlap=False) == ()


def test_fewer_messages_and_more_bytes_pay_on_fast_networks() -> None:
    """An allgather at 0.3 among 8 sends more than dense, in a ring that is half as long."""
    specs, config = [TensorSpec("w", (12_000,), "float32")], TopK(0.3, values="float32")
    plain, other = dense(specs, APART), compressed(specs, APART, "allgather", config)
    free = replace(machine(4e10), kernels=NOTHING)
    (span,) = faster([plain], other, free, TRAINING, overlap=False)
    more_bits = 8 * (1 + HEADERS) * (other.node_bytes - plain.node_bytes)
    bandwidth = more_bits / (7 * NETWORK.latency)
    assert (span.above, span.below) == (pytest.approx(bandwidth), math.inf)
    table = rows([plain, other], free, TRAINING, overlap=False)
    assert f"and pays above {rate(bandwidth)}." in judge(table, overlap=False).text
    slow = replace(free, network=replace(NETWORK, bandwidth=bandwidth / 2))
    table = rows([plain, other], slow, TRAINING, overlap=False)
    assert judge(table, overlap=False).text.endswith(f"It would pay above {rate(bandwidth)}.")


def test_bandwidths_in_words() -> None:
    assert written([Span(0.0, 1e6), Span(1e9, math.inf)]) == "below 1 Mbit/s and above 1 Gbit/s"
    assert str(Span(1e6, 1e9)) == "between 1 Mbit/s and 1 Gbit/s"
    assert str(Span(0.0, math.inf)) == "at any bandwidth"


def test_on_one_node_no_bandwidth_is_named() -> None:
    strategies = listed(nodes_of(4, 4), "float32")
    for local in (1e8, 1e14):
        here = replace(MACHINE, network=replace(NETWORK, local_bandwidth=local))
        table = rows(strategies, here, TRAINING, overlap=True)
        assert {row.faster for row in table} == {None}
        text = judge(table, overlap=True).text
        assert "On one node nothing crosses a network card." in text
        assert "bit/s" not in text


@pytest.mark.parametrize("overlap", [False, True])
def test_the_verdict_flips_at_the_last_crossing(overlap: bool) -> None:
    strategies = listed(APART, "float32", "int8")
    last = max(
        row.faster[-1].below
        for row in rows(strategies, MACHINE, TRAINING, overlap=overlap)
        if row.strategy.ours and row.faster
    )

    def verdict(bandwidth: float) -> tuple[bool, str]:
        found = judge(
            rows(strategies, machine(bandwidth), TRAINING, overlap=overlap), overlap=overlap
        )
        return found.compress, found.text

    below, above = verdict(last / 1.02), verdict(last * 1.02)
    assert below[0]
    assert below[1].startswith("compress: exchange=")
    assert not above[0]
    assert above[1].startswith("do not compress: dense float")
    assert "It would pay below" in above[1]


def test_signs_are_not_recommended() -> None:
    strategies = listed(APART, "float32", "sign")
    found = judge(rows(strategies, machine(1e7), TRAINING, overlap=False), overlap=False)
    assert found.compress
    assert "values='float32'" in found.text


def test_the_verdict_names_what_is_faster_still() -> None:
    strategies = listed(APART, "float32")

    def verdict(kernels: Kernels, bandwidth: float) -> str:
        here = replace(machine(bandwidth), kernels=kernels)
        return judge(rows(strategies, here, TRAINING, overlap=False), overlap=False).text

    free = verdict(replace(KERNELS, multiply=0.0, triad=0.0), 1e8)
    assert free.startswith("compress: ")
    assert "PowerSGD rank 4 is faster still: " in free
    assert "faster still" not in verdict(replace(KERNELS, multiply=1e-8), 1e8)
    slow = verdict(replace(KERNELS, encode=1.0, multiply=1.0), 1e8)
    assert slow.startswith("do not compress: dense float16 takes ")
    assert "faster still" not in slow


# Constants


def test_constants_are_found_again() -> None:
    """Of allreduces and allgathers at 2 and 4 ranks, without noise."""
    network = Network(3e8, latency=2e-4, overhead=1.5e-3, add=3e-10)
    sent = [
        collective
        for ranks in (2, 4)
        for size in (4, 10_000, 1_000_000, 30_000_000)
        for collective in (
            ring_allreduce(size, nodes_of(ranks, 1)),
            CollectiveCost(1, 3 * (ranks - 1), (ranks - 1) * size, 0, (ranks - 1) * size),
        )
    ]
    found = fit([Sample(each, each.seconds(network)) for each in sent])
    for name in ("bandwidth", "latency", "overhead", "add"):
        assert getattr(found, name) == pytest.approx(getattr(network, name), rel=1e-3), name
    copying = replace(network, goodput=0.9, copy=2e-10)
    known = [
        Sample(each, each.seconds(replace(copying, bandwidth=rate), 2.0), 2.0, rate)
        for each in sent
        for rate in (1e8, 3e8)
    ]
    again = fit(known)
    assert again.bandwidth == 3e8
    assert (again.copy, again.goodput) == pytest.approx((2e-10, 0.9), rel=1e-3)
    faster_than_said = [replace(sample, bandwidth=sample.bandwidth / 2) for sample in known]
    more = fit(faster_than_said)
    assert (more.bandwidth, more.goodput) == (pytest.approx(2 * 0.9 * 1.5e8, rel=1e-3), 1.0)
    single = fit([sample for sample in known if sample.bandwidth == 1e8])
    assert single.copy == 0  # which one bandwidth cannot tell from the rest
    assert single.goodput < 0.9
    with pytest.raises(ValueError, match="all, or none"):
        fit([known[0], Sample(sent[0], 1.0)])


def test_no_constant_is_negative() -> None:
    assert least_squares([[1.0, 0.0], [1.0, 1.0]], [1.0, 0.5]) == pytest.approx([0.75, 0.0])
    assert least_squares([[1.0], [1.0]], [-1.0, -2.0]) == [0.0]
    with pytest.raises(ValueError, match="do not tell the bandwidth"):
        fit(
            [Sample(CollectiveCost(1, 2, 4, 0, 4), 1.0), Sample(CollectiveCost(1, 2, 4, 0, 4), 1.0)]
        )


def test_a_machine_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    kept = Machine(replace(NETWORK, local_bandwidth=1e10), KERNELS, 2.0, 4, "a test")
    machines.write(kept, path)
    assert machines.read(path) == kept
    assert machines.read(machines.REFERENCE).origin


@pytest.mark.parametrize(
    ("part", "field", "value", "message"),
    [
        ("network", "bandwidth", 0, "bandwidth=0: give a number that is above 0"),
        ("network", "latency", -1.0, "latency=-1.0: give a number that is 0 or more"),
        ("kernels", "encode", "fast", "encode='fast'"),
        (None, "cores", 0.0, "cores=0.0: give a number that is above 0"),
        ("network", "goodput", 5, "goodput=5: give a number that is above 0 and 1 at most"),
        ("kernels", "encode", True, "encode=True: give a number that is 0 or more"),
        ("kernels", "encode", math.inf, "encode=inf: give a number that is 0 or more"),
        (None, "device", "gpu", "device='gpu': give one of cpu, cuda"),
        (None, "crowd", 0, "crowd=0: a whole number of ranks shares the cores, 1 or more"),
        (None, "crowd", True, "crowd=True: a whole number of ranks"),
        ("kernels", "speed", 1.0, "unexpected keyword"),
    ],
)
def test_machines_that_are_none(
    part: str | None, field: str, value: object, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "machine.json"
    machines.write(MACHINE, path)
    found = json.loads(path.read_text())
    (found if part is None else found[part])[field] = value
    path.write_text(json.dumps(found))
    with pytest.raises(
        ValueError, match=rf"machine\.json has no machine's constants \(.*{message}"
    ):
        machines.read(path)
    for other in (b"[]", b"\xff{}", b"{"):
        path.write_bytes(other)
        with pytest.raises(ValueError, match=r"machine\.json has no machine's constants"):
            machines.read(path)
    with pytest.raises(ValueError, match="cannot be read"):
        machines.read(tmp_path / "absent.json")


def test_quantities() -> None:
    assert [bits_per_second(t) for t in ("100mbit", "2.5Gbit", "8bit")] == [1e8, 2.5e9, 8.0]
    assert [seconds(t) for t in ("62.5ms", "50us", "2s")] == pytest.approx([0.0625, 5e-5, 2.0])
    assert [rate(r) for r in (1e10, 3e8, 2e12, 5e4)] == [
        "10 Gbit/s",
        "300 Mbit/s",
        "2 Tbit/s",
        "50 kbit/s",
    ]
    assert [milliseconds(s) for s in (0.0625, 0, 1.2345, 1e-6)] == ["62.5", "0", "1234", "0.00100"]
    for text in ("fast", "0mbit", "10"):
        with pytest.raises(ValueError, match="is not a bandwidth"):
            bits_per_second(text)
    with pytest.raises(ValueError, match="is not a time"):
        seconds("62.5")
