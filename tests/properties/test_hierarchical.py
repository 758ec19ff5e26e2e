"""The laws of the hierarchical exchange, on nodes of equal and unequal sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from oracle.backends import NUMPY, Backend, each_backend
from oracle.examples import examples
from oracle.jobs import NONFINITE, jobs, steps
from oracle.world import Gradients, World, nodes_of_sizes, same_bits

from horovod_topk.core.plan.buckets import Plan, TensorSpec, make_plan
from horovod_topk.core.plan.nodes import Location, Nodes, nodes_of
from horovod_topk.core.plan.shards import first_block, shard_sums
from horovod_topk.errors import PayloadError, StateDictError
from horovod_topk.methods.topk import TopK
from horovod_topk.ops.coding import index_bytes

SIZES = {"conv": 9000, "bias": 70, "odd": 512 * 4 + 5}
ALTERNATING = Nodes(((0, 2, 4), (1, 3)))
CROSSED = Nodes(((0, 3), (1, 2)))
NODES = [(2, 2), (3, 1), (1, 3), (4, 4), (2, 3, 3), (1, 1, 1), (3,), (1,), (2, 2, 2, 2)]
NODES = [*map(nodes_of_sizes, NODES), ALTERNATING, CROSSED]

each_topology = pytest.mark.parametrize("nodes", NODES, ids=lambda nodes: str(nodes.ranks))


def plan_of(**settings: Any) -> Plan:
    specs = [TensorSpec(name, (n,), "float32") for name, n in SIZES.items()]
    reduction = settings.pop("reduction", "average")
    given = {"ratio": 0.05, "min_numel": 100, "exchange": "hierarchical", **settings}
    return make_plan(specs, TopK(**given), reduction)


def world_of(nodes: Nodes | tuple[int, ...], backend: Backend = NUMPY, **settings: Any) -> World:
    """nodes: or the ranks on each."""
    nodes = nodes if isinstance(nodes, Nodes) else nodes_of_sizes(nodes)
    return World(plan_of(**settings), sum(nodes.sizes), backend, nodes=nodes)


def some_gradients(random: np.random.Generator, ranks: int) -> list[Gradients]:
    return [
        {name: random.standard_normal(n).astype(np.float32) for name, n in SIZES.items()}
        for _ in range(ranks)
    ]


def owed(world: World) -> dict[str, NDArray[Any]]:
    """What the owners keep, where its elements lie, in units of the mean."""
    parts, kept = world.nodes.owners, world.owned()
    total = {name: np.zeros(n) for name, n in SIZES.items()}
    for node in world.nodes.ranks:
        for part, rank in enumerate(node[:parts]):
            for name, own in kept[rank].items():
                first = first_block(name, parts, part)
                places = NUMPY.ops.global_index(np.arange(own.size), parts, first)
                total[name][places] += own / world.size
    return total


@pytest.mark.one_in(4)
@each_backend
@each_topology
@pytest.mark.parametrize("values", ["float32", "int4", "sign"])
def test_applied_and_owed_are_the_sum_of_all_means(
    backend: Backend, nodes: Nodes, values: str
) -> None:
    world, random = world_of(nodes, backend, values=values), np.random.default_rng(0)
    applied, given_ = ({name: np.zeros(n) for name, n in SIZES.items()} for _ in range(2))
    for _ in range(4):
        gradients = some_gradients(random, world.size)
        exchanged = world.step(gradients)
        assert same_bits(exchanged, [exchanged[0]] * world.size)
        for name in SIZES:
            applied[name] += exchanged[0][name]
            given_[name] += np.mean([one[name].astype(np.float64) for one in gradients], 0)
    left = owed(world)
    for name in SIZES:
        np.testing.assert_allclose(applied[name] + left[name], given_[name], atol=2e-5)
    assert left["conv"].any()
    assert not any(e.any() for one in world.residuals() for e in one.values())


@each_topology
def test_a_sum_is_as_many_means(nodes: Nodes) -> None:
    mean, total = world_of(nodes), world_of(nodes, reduction="sum")
    gradients = some_gradients(np.random.default_rng(0), mean.size)
    one, other = mean.step(gradients)[0], total.step(gradients)[0]
    for name in SIZES:
        np.testing.assert_allclose(one[name] * mean.size, other[name], rtol=1e-6)


@each_topology
def test_groups_are_in_the_order_in_which_they_gather(nodes: Nodes) -> None:
    assert all(list(group) == sorted(group) for group in nodes.groups)


@st.composite
def topologies(draw: st.DrawFn) -> Nodes:
    """Nodes of 1 to 8 ranks in all, in any order."""
    at = draw(st.lists(st.integers(0, 3), min_size=1, max_size=8))
    return nodes_of([Location("host", 0, node) for node in at])


@each_backend
@examples(20)
@given(data=st.data())
def test_every_rank_has_the_same_bits(backend: Backend, data: st.DataObject) -> None:
    nodes = data.draw(topologies())
    job = data.draw(jobs(ranks=st.just(sum(nodes.sizes)), exchanges=["hierarchical"]))
    worlds = [World(job.plan, job.ranks, each, nodes=nodes) for each in (backend, NUMPY)]
    for gradients in data.draw(steps(job, 2, huge=True)):
        exchanged, expected = (world.step(gradients) for world in worlds)
        assert same_bits(exchanged, [exchanged[0]] * job.ranks)
        assert same_bits(exchanged, expected)
    assert same_bits(*(world.owned() for world in worlds))


@given(data=st.data())
def test_three_collectives_a_bucket_of_sizes_that_the_plan_knows(data: st.DataObject) -> None:
    nodes = data.draw(topologies())
    job = data.draw(jobs(ranks=st.just(sum(nodes.sizes)), exchanges=["hierarchical"]))
    world = World(job.plan, job.ranks, NUMPY, "job.7", nodes)
    count = 2
    for gradients in data.draw(steps(job, count)):
        world.step(gradients)
    for rank, compressor in enumerate(world.ranks):
        sent = [(name, len(payload)) for name, payload in world.payloads(rank)]
        assert sorted(sent) == sorted(legs(world, rank) * count)
        handed = sum(size for _, size in legs(world, rank))
        assert compressor.traffic().payload_bytes == handed


def legs(world: World, rank: int) -> list[tuple[str, int]]:
    """Names and bytes of what a rank hands to collectives in a step."""
    node, owners = world.nodes.of(rank), world.nodes.owners
    owns, expected = world.nodes.position(rank) < owners, []
    for bucket in world.plan.buckets:
        plan, name = shard_sums(bucket, world.nodes), f"job.7.{bucket.ordinal}"
        width = 8 if bucket.residual_dtype == "float64" else 4
        back = plan.sum_bytes if owns else 0
        if len(node) > 1:
            expected.append((f"{name}.reduce", width * sum(each.numel for each in plan.sums)))
            expected.append((f"{name}.spread", back * len(world.nodes.ranks)))
        if len(world.nodes.ranks) > 1 and owns:
            expected.append((f"{name}.gather", back))
    return expected


@pytest.mark.one_in(4)
@each_backend
@each_topology
@pytest.mark.parametrize("value", NONFINITE)
def test_what_one_rank_finds_non_finite_is_so_on_every_rank(
    backend: Backend, nodes: Nodes, value: float
) -> None:
    """Also on a rank that owns nothing; the whole tensor is poisoned, and nothing commits."""
    world, random = world_of(nodes, backend), np.random.default_rng(0)
    world.step(some_gradients(random, world.size))
    before = world.owned()
    for victim in range(world.size):
        gradients = some_gradients(random, world.size)
        gradients[victim]["odd"][70] = value
        for one in world.exchange(gradients):
            assert np.isnan(one["odd"]).all()
            assert np.isfinite(one["conv"]).all()
        assert world.commit() == [False] * world.size
        assert same_bits(world.owned(), before)


@pytest.mark.one_in(4)
@each_backend
@each_topology
def test_state_dicts_have_what_the_owners_keep(backend: Backend, nodes: Nodes) -> None:
    first, second = (world_of(nodes, backend, values="int8") for _ in range(2))
    random = np.random.default_rng(0)
    for _ in range(3):
        first.step(some_gradients(random, first.size))
    states = [compressor.state_dict() for compressor in first.ranks]
    assert [bool(s["owned"]["residuals"]) for s in states] == [
        first.nodes.position(rank) < first.nodes.owners for rank in range(first.size)
    ]
    for state, other in zip(states, second.ranks, strict=True):
        other.load_state_dict(state)
    assert same_bits(first.owned(), second.owned())
    gradients = some_gradients(random, first.size)
    assert same_bits(first.step(gradients), second.step(gradients))


def test_the_state_of_other_ranks_and_nodes_is_refused() -> None:
    world, random = world_of((2, 2)), np.random.default_rng(0)
    world.step(some_gradients(random, 4))
    before = world.owned()
    here = r"this is rank 0 of 4 that own shards on nodes \[\[0, 1\], \[2, 3\]\]"
    others = [world.ranks[1], world_of((1, 3)).ranks[0]]
    for exchange in ("sharded", "allgather"):
        others.append(World(plan_of(exchange=exchange), 4, NUMPY).ranks[0])
    for other in others:
        with pytest.raises(StateDictError, match=here):
            world.ranks[0].load_state_dict(other.state_dict())
    assert same_bits(world.owned(), before)


@each_backend
@pytest.mark.parametrize("part", ["header", "indices"])
@pytest.mark.parametrize(
    ("nodes", "lane", "culprit"),
    [
        (Nodes(((0,), (1, 2, 3), (4, 5))), 0, 4),
        (CROSSED, 1, 3),  # on the first node, and later in its group
    ],
    ids=["in a row", "crossed"],
)
def test_a_damaged_payload_names_the_rank_that_sent_it(
    backend: Backend, part: str, nodes: Nodes, lane: int, culprit: int
) -> None:
    world = world_of(nodes, backend)
    gradients = some_gradients(np.random.default_rng(0), world.size)
    world.launch(gradients)
    for compressor in world.ranks:
        compressor.step.advance()
    (conv, *_) = shard_sums(world.plan.buckets[0], nodes).sums[lane].tensors
    size = index_bytes("packed", conv.numel, conv.k)
    at, size = (0, 4) if part == "header" else (conv.index_at, size)
    owners = nodes.cross_groups[lane]
    posted = world.network.groups[owners]._posted["job.0.0.gather", 0]
    stretch = backend.ops.view(posted[owners.index(culprit)], at, at + size)
    backend.ops.assign(stretch, backend.array(np.full(size, 255), "uint8"))
    where = f"bucket 0, rank {culprit}: "
    message = {"header": f"{where}the bytes ffffffff", "indices": f"'conv': {where}its indices"}
    for compressor in world.ranks:
        compressor.step.advance()
    for rank in range(world.size):
        with pytest.raises(PayloadError, match=message[part]):
            world.ranks[rank].step.finish(0, world._of_bucket(rank, world.plan.buckets[0]))
        assert all(
            np.array_equal(backend.numpy(world._arrays[rank][name]), gradients[rank][name])
            for name in SIZES
        )


def assert_nothing_applied(world: World, ranks: list[int]) -> None:
    """These ranks end the step with NaN, and without a commit."""
    for _ in range(2):
        for rank in ranks:
            world.ranks[rank].step.advance()
    for rank in ranks:
        gradients = world._of_bucket(rank, world.plan.buckets[0])
        world.ranks[rank].step.finish(0, gradients)
        assert all(np.isnan(g).all() for g in gradients)
        assert not world.ranks[rank].commit()


@pytest.mark.parametrize("sizes", [(2, 2), (1, 3), (3,)], ids=str)
def test_an_owner_that_refuses_a_sum_tells_the_others(sizes: tuple[int, ...]) -> None:
    """Only the ranks of a node see what is summed there: the others would wait."""
    world, random = world_of(sizes), np.random.default_rng(0)
    world.step(some_gradients(random, world.size))
    before = world.owned()
    world.launch(some_gradients(random, world.size))
    node = world.nodes.ranks[-1]
    posted = world.network.groups[node]._posted["job.0.0.reduce", 1]
    whole, count = posted[1], posted[1].size
    posted[1] = posted[1][:-5]
    message = f"{count - 5} elements arrived from rank 1 of this node, the plan says {count}"
    with pytest.raises(PayloadError, match=message):
        world.ranks[node[0]].step.advance()
    posted[1] = whole
    assert_nothing_applied(world, [rank for rank in range(world.size) if rank != node[0]])
    world.ranks[node[0]].abandon()
    assert same_bits(world.owned(), before)
    exchanged = world.step(some_gradients(random, world.size))
    assert same_bits(exchanged, [exchanged[0]] * world.size)


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1), (1, 1), (3,)], ids=str)
def test_an_owner_that_abandons_a_step_does_not_hold_up_the_others(sizes: tuple[int, ...]) -> None:
    world, random = world_of(sizes), np.random.default_rng(0)
    world.launch(some_gradients(random, world.size))
    world.ranks[0].abandon()
    assert_nothing_applied(world, list(range(1, world.size)))
    exchanged = world.step(some_gradients(random, world.size))
    assert same_bits(exchanged, [exchanged[0]] * world.size)
    assert not np.isnan(exchanged[0]["conv"]).any()


@pytest.mark.parametrize("turns", [0, 2])
def test_a_rank_that_owns_nothing_abandons_alone(turns: int) -> None:
    """It keeps nothing that could be lost, and what it sent counts."""
    world, random = world_of((1, 3)), np.random.default_rng(0)
    gradients = some_gradients(random, 4)
    expected = world_of((1, 3)).step(gradients)
    world.launch(gradients)
    for _ in range(turns):
        for compressor in world.ranks:
            compressor.step.advance()
    if turns == 0:
        world.ranks[3].abandon()
    for _ in range(2):
        for compressor in world.ranks[:3]:
            compressor.step.advance()
    if turns == 2:
        world.ranks[3].abandon()
    for rank in range(3):
        found = world._of_bucket(rank, world.plan.buckets[0])
        world.ranks[rank].step.finish(0, found)
        for name, g in zip(SIZES, found, strict=True):
            assert g.tobytes() == expected[rank][name].tobytes()


def test_the_gradients_norm_is_of_this_rank() -> None:
    world = world_of((3, 1))
    gradients = some_gradients(np.random.default_rng(0), 4)
    world.step(gradients)
    for compressor, one in zip(world.ranks, gradients, strict=True):
        norm = np.sqrt(sum(np.square(g.astype(np.float64)).sum() for g in one.values()))
        assert compressor.gradient_norm() == pytest.approx(norm, rel=1e-6)


def test_fewer_tensors_keep_what_they_owe() -> None:
    """A parameter whose gradients became sparse leaves the plan."""
    world, random = world_of((2, 1)), np.random.default_rng(0)
    world.step(some_gradients(random, 3))
    before = world.owned()
    for compressor in world.ranks:
        compressor.replan(world.plan.without("bias"))
    world.plan = world.plan.without("bias")
    assert same_bits(world.owned(), [{n: one[n] for n in ("conv", "odd")} for one in before])
    assert world.ranks[0].norm_of("conv") > 0
    assert world.ranks[1].norm_of("conv") == 0


def test_a_node_sends_less_than_its_ranks_would() -> None:
    """Between nodes the bytes do not depend on how many ranks a node has."""
    plan = make_plan([TensorSpec("w", (10**6,), "float32")], TopK(exchange="hierarchical"))
    traffic = [
        World(plan, 2 * size, NUMPY, nodes=nodes_of_sizes((size, size))).ranks[0].traffic()
        for size in (1, 4)
    ]
    alone, four = (each.node_bytes for each in traffic)
    assert alone is not None
    assert four is not None
    assert abs(four - alone) < 0.02 * alone
    assert traffic[1].between_bytes == four // 4
    assert traffic[1].sent_bytes > 3 * 10**6  # and within the node the dense gradients


# Who shares a node.


def located(*spots: tuple[str, int]) -> list[Location]:
    return [Location(host, local, rank - local) for rank, (host, local) in enumerate(spots)]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (located(("a", 0), ("a", 1), ("b", 0)), ((0, 1), (2,))),
        (located(("a", 0), ("a", 1), ("a", 0), ("a", 1)), ((0, 1), (2, 3))),
        (located(("a", 0), ("b", 0), ("a", 1), ("b", 1)), ((0, 2), (1, 3))),
        (located(("a", 0), ("b", 0), ("b", 1), ("a", 1)), ((0, 3), (1, 2))),
        (located(("b", 1), ("a", 3), ("b", 2)), ((0, 2), (1,))),
        ([Location("a", rank, 0) for rank in range(2)], ((0, 1),)),
    ],
    ids=["in a row", "one name for two", "dealt round", "there and back", "some ranks", "MPI's"],
)
def test_nodes_from_locations(found: list[Location], expected: tuple[tuple[int, ...], ...]) -> None:
    assert nodes_of(found).ranks == expected


def test_who_exchanges_with_whom() -> None:
    nodes = nodes_of_sizes((2, 3))
    assert nodes.cross_groups == ((0, 2), (1, 3))
    assert nodes.groups == ((0, 1), (2, 3, 4), (0, 2), (1, 3))
    assert nodes_of_sizes((1, 1)).groups == ((0, 1),)
    assert nodes_of_sizes((2,)).groups == ((0, 1),)
    assert Nodes(((0, 2), (1,))).position(2) == 1
