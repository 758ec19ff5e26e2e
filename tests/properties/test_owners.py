"""Laws of exchanges with owners: owners' residuals count, and errors reach all ranks.

Laws that hold for every method and exchange are in tests/contract/test_methods.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from oracle.backends import NUMPY, Backend, each_backend
from oracle.examples import examples
from oracle.jobs import jobs, steps
from oracle.world import Gradients, World, drawn, nodes_of_sizes, same_bits

from horovod_topk.core.plan.buckets import Plan, TensorSpec, make_plan
from horovod_topk.core.plan.nodes import Location, Nodes, nodes_of
from horovod_topk.core.plan.shards import first_block, shard, shard_numel, shard_sums
from horovod_topk.errors import PayloadError, StateDictError
from horovod_topk.methods.topk import TopK
from horovod_topk.ops.coding import index_bytes

SIZES = {"conv": 9000, "bias": 70, "odd": 512 * 4 + 5}
SPECS = [TensorSpec(name, (n,), "float32") for name, n in SIZES.items()]
ALTERNATING = Nodes(((0, 2, 4), (1, 3)))
CROSSED = Nodes(((0, 3), (1, 2)))
NODES = [(2, 2), (3, 1), (1, 3), (4, 4), (2, 3, 3), (1, 1, 1), (3,), (1,), (2, 2, 2, 2)]
NODES = [*map(nodes_of_sizes, NODES), ALTERNATING, CROSSED]
ROWS = [("sharded", nodes_of_sizes([1] * ranks)) for ranks in (2, 3, 4, 8)]
ROWS += [("allgather", nodes_of_sizes([1] * 8)), *(("hierarchical", each) for each in NODES)]

each_row = pytest.mark.parametrize(
    ("exchange", "nodes"), ROWS, ids=[f"{kind}-{nodes.ranks}" for kind, nodes in ROWS]
)


def plan_of(exchange: str, reduction: str = "average", **settings: Any) -> Plan:
    given = {"ratio": 0.05, "min_numel": 100, "exchange": exchange, **settings}
    return make_plan(SPECS, TopK(**given), reduction)


def sharded(ranks: int, backend: Backend = NUMPY, **settings: Any) -> World:
    return World(plan_of("sharded", **settings), ranks, backend)


def hierarchical(
    nodes: Nodes | tuple[int, ...], backend: Backend = NUMPY, **settings: Any
) -> World:
    """nodes: or the ranks on each."""
    nodes = nodes if isinstance(nodes, Nodes) else nodes_of_sizes(nodes)
    return World(plan_of("hierarchical", **settings), sum(nodes.sizes), backend, nodes=nodes)


def waiting(world: World) -> dict[str, NDArray[Any]]:
    """Mean of the ranks' residuals, and the owners' where their elements lie, in units of it."""
    total = {name: np.zeros(n) for name, n in SIZES.items()}
    exchange = world.ranks[0].exchange
    keeps = exchange.kind != "hierarchical"
    share = 1 if keeps else 1 / world.size  # owners of nodes keep parts of sums
    for name, sums in total.items():
        if keeps:
            sums += np.mean([one[name].astype(np.float64) for one in world.residuals()], 0)
        for own, compressor in zip(world.owned(), world.ranks, strict=False):
            part, parts = compressor.exchange.part, exchange.parts
            if part is not None:
                first = first_block(name, parts, part)
                places = NUMPY.ops.global_index(np.arange(own[name].size), parts, first)
                sums[places] += own[name] * share
    return total


@pytest.mark.one_in(5)
@each_backend
@each_row
@pytest.mark.parametrize("values", ["float32", "int8", "int4", "int3", "int2", "sign"])
def test_applied_and_waiting_are_the_sum_of_all_means(
    backend: Backend, exchange: str, nodes: Nodes, values: str
) -> None:
    ratio = {"gather_ratio": 0.02} if exchange == "sharded" else {}
    plan = plan_of(exchange, values=values, **ratio)
    world, random = World(plan, sum(nodes.sizes), backend, nodes=nodes), np.random.default_rng(0)
    applied, given_ = ({name: np.zeros(n) for name, n in SIZES.items()} for _ in range(2))
    for _ in range(4):
        gradients = drawn(SPECS, world.size, random)
        exchanged = world.step(gradients)
        assert same_bits(exchanged, [exchanged[0]] * world.size)
        for name in SIZES:
            applied[name] += exchanged[0][name]
            given_[name] += np.mean([one[name].astype(np.float64) for one in gradients], 0)
    left = waiting(world)
    for name in SIZES:
        np.testing.assert_allclose(applied[name] + left[name], given_[name], atol=2e-5)
    assert left["conv"].any()
    if exchange == "sharded":
        assert all(one["conv"].any() for one in world.owned())
    if exchange == "hierarchical":
        assert not any(e.any() for one in world.residuals() for e in one.values())


@st.composite
def topologies(draw: st.DrawFn) -> Nodes:
    """Nodes of 1 to 8 ranks in all, in any order."""
    at = draw(st.lists(st.integers(0, 3), min_size=1, max_size=8))
    return nodes_of([Location("host", 0, node) for node in at])


@each_backend
@pytest.mark.parametrize("exchange", ["sharded", "hierarchical"])
@examples(20)
@given(data=st.data())
def test_every_rank_and_framework_has_the_same_bits(
    backend: Backend, exchange: str, data: st.DataObject
) -> None:
    nodes = data.draw(topologies())
    job = data.draw(jobs(ranks=st.just(sum(nodes.sizes)), exchanges=[exchange]))
    worlds = [World(job.plan, job.ranks, each, nodes=nodes) for each in (backend, NUMPY)]
    for gradients in data.draw(steps(job, 2, huge=True)):
        exchanged, expected = (world.step(gradients) for world in worlds)
        assert same_bits(exchanged, [exchanged[0]] * job.ranks)
        assert same_bits(exchanged, expected)
    assert same_bits(*(world.owned() for world in worlds))


@given(
    numel=st.integers(0, 9000), parts=st.integers(1, 9), name=st.sampled_from(["", "w", "läyer/b"])
)
def test_every_element_has_one_owner(numel: int, parts: int, name: str) -> None:
    places = [
        NUMPY.ops.global_index(np.arange(shard_numel(numel, parts, first)), parts, first)
        for first in (first_block(name, parts, part) for part in range(parts))
    ]
    assert np.array_equal(np.sort(np.concatenate(places)), np.arange(numel))
    assert max(map(len, places)) - min(map(len, places)) <= 512


# States.


def test_the_state_of_other_ranks_and_nodes_is_refused() -> None:
    world, random = hierarchical((2, 2)), np.random.default_rng(0)
    world.step(drawn(SPECS, 4, random))
    before = world.owned()
    here = r"this is rank 0 of 4 that own shards on nodes \[\[0, 1\], \[2, 3\]\]"
    others = [world.ranks[1], hierarchical((1, 3)).ranks[0]]
    for exchange in ("sharded", "allgather"):
        others.append(World(plan_of(exchange), 4, NUMPY).ranks[0])
    for other in others:
        with pytest.raises(StateDictError, match=here):
            world.ranks[0].load_state_dict(other.state_dict())
    assert same_bits(world.owned(), before)


@pytest.mark.parametrize("exchange", ["sharded", "hierarchical"])
def test_fewer_tensors_keep_what_waits(exchange: str) -> None:
    """A parameter whose gradients became sparse leaves the plan."""
    world, random = World(plan_of(exchange), 3, NUMPY), np.random.default_rng(0)
    world.step(drawn(SPECS, 3, random))
    before = world.owed()
    for compressor in world.ranks:
        compressor.replan(world.plan.without("bias"))
    world.plan = world.plan.without("bias")
    assert same_bits(
        world.owed(), [{n: e for n, e in one.items() if n != "bias"} for one in before]
    )
    norms = [compressor.norm_of("conv") > 0 for compressor in world.ranks]
    assert norms == [True, exchange == "sharded", True]  # the second rank owns nothing of its node


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


# A rank that fails.


@each_backend
@pytest.mark.parametrize("direction", ["scatter", "gather"])
def test_a_damaged_payload_to_or_from_an_owner_names_the_rank(
    backend: Backend, direction: str
) -> None:
    world = sharded(3, backend)
    gradients = drawn(SPECS, 3, 0)
    world.launch(gradients)
    split = shard(world.plan.buckets[0], 3)
    if direction == "gather":
        world.advance()
    posted = world.network._posted[(f"job.0.0.{direction}", 0)]
    # For rank 0 in a scatter: of rank 2's payloads the first.
    each = split.scatter[0] if direction == "scatter" else split.gather[2]
    conv = each.tensors[0]
    size = index_bytes("packed", conv.numel, conv.k)
    stretch = backend.ops.view(posted[2], conv.index_at, conv.index_at + size)
    backend.ops.assign(stretch, backend.array(np.full(size, 255), "uint8"))
    with pytest.raises(PayloadError, match=r"'conv': bucket 0, rank 2: its indices"):
        world.finish()
    assert_untouched(world, gradients)


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
def test_a_damaged_payload_between_nodes_names_the_rank(
    backend: Backend, part: str, nodes: Nodes, lane: int, culprit: int
) -> None:
    world = hierarchical(nodes, backend)
    gradients = drawn(SPECS, world.size, 0)
    world.launch(gradients)
    world.advance()
    (conv, *_) = shard_sums(world.plan.buckets[0], nodes).sums[lane].tensors
    size = index_bytes("packed", conv.numel, conv.k)
    at, size = (0, 4) if part == "header" else (conv.index_at, size)
    owners = nodes.cross_groups[lane]
    posted = world.network.groups[owners]._posted["job.0.0.gather", 0]
    stretch = backend.ops.view(posted[owners.index(culprit)], at, at + size)
    backend.ops.assign(stretch, backend.array(np.full(size, 255), "uint8"))
    where = f"bucket 0, rank {culprit}: "
    message = {"header": f"{where}the bytes ffffffff", "indices": f"'conv': {where}its indices"}
    world.advance()
    for rank in range(world.size):
        with pytest.raises(PayloadError, match=message[part]):
            world.ranks[rank].step.finish({0: world._of_bucket(rank, world.plan.buckets[0])})
    assert_untouched(world, gradients)


def assert_untouched(world: World, gradients: list[Gradients]) -> None:
    """All ranks have their own gradients still."""
    arrays = [{n: world.backend.numpy(a) for n, a in one.items()} for one in world._arrays]
    assert same_bits(arrays, gradients)


def assert_nothing_applied(world: World, ranks: list[int]) -> None:
    """These ranks end the step with NaN, and without a commit."""
    for _ in range(2):
        for rank in ranks:
            world.ranks[rank].step.advance()
    for rank in ranks:
        gradients = world._of_bucket(rank, world.plan.buckets[0])
        world.ranks[rank].step.finish({0: gradients})
        assert all(np.isnan(g).all() for g in gradients)
        assert not world.ranks[rank].commit()


def test_an_owner_that_refuses_a_payload_tells_the_others() -> None:
    """Only the owner reads what came for it: the others would wait for its part of the gather."""
    world = sharded(3)
    random = np.random.default_rng(0)
    world.step(drawn(SPECS, 3, random))
    before = world.owed()
    world.launch(drawn(SPECS, 3, random))
    posted = world.network._posted[("job.0.0.scatter", 1)]
    posted[2][0:4] = 0  # of rank 2's payload for rank 0 the magic
    with pytest.raises(PayloadError, match="bucket 0, rank 2: the bytes 00000000"):
        world.ranks[0].step.advance()
    assert_nothing_applied(world, [1, 2])
    world.ranks[0].abandon()
    assert same_bits(world.owed(), before)
    world.step(drawn(SPECS, 3, random))


@pytest.mark.parametrize("sizes", [(2, 2), (1, 3), (3,)], ids=str)
def test_an_owner_that_refuses_a_sum_tells_the_others(sizes: tuple[int, ...]) -> None:
    """Only the ranks of a node see what is summed there: the others would wait."""
    world, random = hierarchical(sizes), np.random.default_rng(0)
    world.step(drawn(SPECS, world.size, random))
    before = world.owned()
    world.launch(drawn(SPECS, world.size, random))
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
    exchanged = world.step(drawn(SPECS, world.size, random))
    assert same_bits(exchanged, [exchanged[0]] * world.size)


@pytest.mark.parametrize(
    "world",
    [sharded(2), *map(hierarchical, [(2, 2), (3, 1), (1, 1), (3,)])],
    ids=lambda world: f"{world.plan.config.exchange}-{world.nodes.sizes}",
)
def test_a_rank_that_abandons_a_step_does_not_hold_up_the_others(world: World) -> None:
    random = np.random.default_rng(0)
    world.launch(drawn(SPECS, world.size, random))
    world.ranks[0].abandon()
    assert_nothing_applied(world, list(range(1, world.size)))
    exchanged = world.step(drawn(SPECS, world.size, random))
    assert same_bits(exchanged, [exchanged[0]] * world.size)
    assert not np.isnan(exchanged[0]["conv"]).any()


@pytest.mark.parametrize("turns", [0, 2])
def test_a_rank_that_owns_nothing_abandons_alone(turns: int) -> None:
    """It keeps nothing that could be lost, and what it sent counts."""
    world, random = hierarchical((1, 3)), np.random.default_rng(0)
    gradients = drawn(SPECS, 4, random)
    expected = hierarchical((1, 3)).step(gradients)
    world.launch(gradients)
    for _ in range(turns):
        world.advance()
    if turns == 0:
        world.ranks[3].abandon()
    for _ in range(2):
        for compressor in world.ranks[:3]:
            compressor.step.advance()
    if turns == 2:
        world.ranks[3].abandon()
    for rank in range(3):
        found = world._of_bucket(rank, world.plan.buckets[0])
        world.ranks[rank].step.finish({0: found})
        for name, g in zip(SIZES, found, strict=True):
            assert g.tobytes() == expected[rank][name].tobytes()


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
