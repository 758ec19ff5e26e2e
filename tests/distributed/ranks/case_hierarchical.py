"""The hierarchical exchange between real ranks, on nodes that a case makes up or the launcher has.

Two ranks make up a node each, or one together; three are on nodes of two and one, four on two nodes
of two. Process sets and collectives are Horovod's; only where a rank says it runs is made up.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import training
from horovod_topk.core.plan.nodes import Location
from horovod_topk.errors import ConfigError, StateDictError
from plain import PlainTopKEF as TopKEF
from training import Setup
from witness import assert_close, assert_ranks_equal, bits, spoiled
from world import hvd, place

pytestmark = pytest.mark.everywhere

SETTINGS = [
    {"values": "float32"},
    {"values": "int8", "min_numel": 300},
]
Placing = Callable[[list[list[int]]], None]


def usual_nodes() -> list[list[int]]:
    """Two nodes of all ranks, the first the larger one."""
    first = -(-hvd.size() // 2)
    return [list(range(first)), list(range(first, hvd.size()))]


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> Placing:
    """Have ranks say that they run on given nodes."""

    def place_on(nodes: list[list[int]]) -> None:
        number = next(i for i, node in enumerate(nodes) if hvd.rank() in node)
        place(monkeypatch, Location("host", 0, number))

    return place_on


def hierarchical(**settings: Any) -> TopKEF:
    return TopKEF(**{"ratio": 0.1, "min_numel": 0, "exchange": "hierarchical", **settings})


@pytest.mark.everywhere(one_in=3)
@pytest.mark.world_size(2, 3, 4)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("build", [training.perceptron, training.Branches])
def test_ranks_end_equal_and_what_was_not_applied_is_kept(
    placed: Placing, build: Any, settings: Any
) -> None:
    """Without a momentum or a weight decay, the parameters are the sum of what was applied."""
    nodes = usual_nodes()
    placed(nodes)
    setup = Setup(build=build, optimizer=training.plain_sgd)
    task, dense = setup.task(), setup.task()
    optimizer = setup.distributed(task, hierarchical(**settings))
    given = [torch.zeros_like(p) for p in task.parameters()]
    start = training.snapshot(task)
    for step in range(6):
        optimizer.zero_grad()
        task.loss(hvd.rank(), step).backward()
        dense.load_state_dict(task.state_dict())
        dense.zero_grad()
        dense.loss(hvd.rank(), step).backward()
        optimizer.step()
        for i, p in enumerate(dense.parameters()):
            if p.grad is not None:
                given[i] += hvd.allreduce(p.grad, name=f"given.{i}")
    assert_ranks_equal(task.parameters())
    applied = [(a - p.detach()) / 0.05 for a, p in zip(start, task.parameters(), strict=True)]
    owed = kept(task, optimizer, nodes)
    for got, left, whole in zip(applied, owed, given, strict=True):
        torch.testing.assert_close(got + left, whole, rtol=1e-4, atol=1e-4)
    assert any(left.abs().max() > 0 for left in owed)


def kept(task: Any, optimizer: Any, nodes: list[list[int]]) -> list[Tensor]:
    """What all owners keep, at its elements, in units of the mean."""
    owned = TopKEF.of(optimizer).state_dict()["owned"]["residuals"]
    owners = min(map(len, nodes))
    position = next(node.index(hvd.rank()) for node in nodes if hvd.rank() in node)
    total = []
    for name, p in task.named_parameters():
        own = torch.zeros(p.numel())
        if position < owners:  # from the docstring of `core.shards`
            block = torch.arange(p.numel()) // 512
            own[block % owners == (position - zlib.crc32(name.encode())) % owners] = owned[name]
        else:
            assert not owned
        total.append(hvd.allreduce(own, name=f"own.{name}").view_as(p))
    return total


@pytest.mark.world_size(2, 3, 4)
@pytest.mark.parametrize("kind", ["two nodes", "one node", "nodes of one rank"])
def test_dense_at_ratio_one(placed: Placing, kind: str) -> None:
    everyone = list(range(hvd.size()))
    single, each = [everyone], [[rank] for rank in everyone]
    placed({"two nodes": usual_nodes(), "one node": single, "nodes of one rank": each}[kind])
    setup = Setup()
    ours = training.trajectory(setup, hierarchical(ratio=1.0), steps=25)
    dense = training.trajectory(setup, hvd.Compression.none, steps=25)
    assert_close(ours[-1], dense[-1])


@pytest.mark.world_size(2, 3, 4)
@pytest.mark.parametrize("victim", ["first", "last"])
def test_a_step_with_a_nan_leaves_all_residuals_as_they_were(placed: Placing, victim: str) -> None:
    """The last of three ranks is alone on its node, the second owns nothing."""
    placed(usual_nodes())
    setup = Setup()
    task = setup.task()
    optimizer = setup.distributed(task, hierarchical(values="int8"))
    training.ordinary(task, optimizer, 0)
    owned = TopKEF.of(optimizer).state_dict()["owned"]["residuals"]
    optimizer.zero_grad()
    weight = next(iter(task.parameters()))
    spoils = hvd.rank() == (0 if victim == "first" else hvd.size() - 1)
    with spoiled(weight, float("nan") if spoils else 0.0, position=3):
        task.loss(hvd.rank(), 1).backward()
    optimizer.synchronize()
    assert weight.grad is not None
    assert weight.grad.isnan().all()
    with optimizer.skip_synchronize():
        optimizer.step()
    now = TopKEF.of(optimizer).state_dict()["owned"]["residuals"]
    assert all(torch.equal(bits([now[name]]), bits([owned[name]])) for name in owned)
    assert TopKEF.of(optimizer).stats().rolled_back == 1


@pytest.mark.world_size(2, 3, 4)
def test_a_step_that_was_cut_off_leaves_no_trace(placed: Placing) -> None:
    """Loading a state of the optimizer forgets what is under way; it comes to its end."""
    placed(usual_nodes())
    setup = Setup(optimizer=training.plain_sgd)
    task, again = setup.task(), setup.task()
    one, other = (setup.distributed(each, hierarchical()) for each in (task, again))
    for step in range(3):
        task.loss(hvd.rank(), step + 100).backward()
        one.load_state_dict(one.state_dict())
        training.ordinary(task, one, step)
        training.ordinary(again, other, step)
    assert torch.equal(bits(task.parameters()), bits(again.parameters()))


@pytest.mark.world_size(3, 4)
def test_a_state_dict_carries_a_run_over(placed: Placing) -> None:
    placed(usual_nodes())
    setup = Setup(optimizer=training.plain_sgd)
    first, second = setup.task(), setup.task()
    one, other = (setup.distributed(task, hierarchical(values="int4")) for task in (first, second))
    for step in range(3):
        training.ordinary(first, one, step)
    second.load_state_dict(first.state_dict())
    TopKEF.of(other).load_state_dict(TopKEF.of(one).state_dict())
    for step in range(3, 6):
        training.ordinary(first, one, step)
        training.ordinary(second, other, step)
    assert torch.equal(bits(first.parameters()), bits(second.parameters()))
    state = TopKEF.of(one).state_dict()
    state["owned"]["nodes"] = [list(range(hvd.size()))]
    with pytest.raises(StateDictError, match=r"on nodes \[\[0, 1"):
        TopKEF.of(other).load_state_dict(state)


@pytest.mark.horovod
@pytest.mark.world_size(4)
def test_stats_say_how_it_travels_and_sets_are_used_again(placed: Placing) -> None:
    placed(usual_nodes())
    tasks = [Setup().task() for _ in range(2)]
    optimizers = [Setup().distributed(task, hierarchical()) for task in tasks]
    for task, optimizer in zip(tasks, optimizers, strict=True):
        training.ordinary(task, optimizer, 0)
        stats = TopKEF.of(optimizer).stats()
        assert (stats.exchange, stats.ranks, stats.nodes) == ("hierarchical", 4, (2, 2))
        assert stats.because == ""
        assert stats.between_bytes is not None
        assert 0 < stats.between_bytes < stats.sent_bytes
        assert stats.node_bytes == 2 * stats.between_bytes
        assert stats.owned_norm > 0 == stats.residual_norm
        assert stats.gradient_norm > 0


def test_ranks_of_one_machine_are_one_node() -> None:
    """Nothing is made up here."""
    task = Setup().task()
    optimizer = Setup().distributed(task, hierarchical())
    training.ordinary(task, optimizer, 0)
    stats = TopKEF.of(optimizer).stats()
    assert (stats.nodes, stats.between_bytes) == ((2,), 0)
    assert stats.because.startswith("one node")


@pytest.mark.world_size(2)
def test_a_second_node_needs_no_process_set_where_ranks_are_alone(placed: Placing) -> None:
    """Two nodes of one rank: the only group is all ranks."""
    placed([[0], [1]])
    task = Setup().task()
    optimizer = Setup().distributed(task, hierarchical())
    training.ordinary(task, optimizer, 0)
    assert_ranks_equal(task.parameters())
    assert TopKEF.of(optimizer).stats().because.startswith("no node has more than one rank")


@pytest.mark.horovod
@pytest.mark.world_size(3)
def test_an_optimizer_of_a_process_set_uses_its_ranks(placed: Placing, pair: Any) -> None:
    placed([[0], [1, 2]])
    if hvd.rank() > 1:
        return
    setup = Setup(options={"process_set": pair})
    task = setup.task()
    optimizer = setup.distributed(task, hierarchical())
    training.ordinary(task, optimizer, 0)
    assert_ranks_equal(task.parameters(), pair)
    assert TopKEF.of(optimizer).stats().nodes == (1, 1)


@pytest.mark.horovod
@pytest.mark.world_size(4)
def test_a_process_set_that_others_would_have_to_add_is_an_error(placed: Placing) -> None:
    trio = hvd.add_process_set([1, 2, 3])
    placed([[1, 2], [0, 3]])
    if hvd.rank() > 0:
        setup = Setup(options={"process_set": trio})
        task = setup.task()
        before = bits(task.parameters()).clone()
        message = r"among ranks such as \[0, 1\].*rank 0 cannot add one.*hvd.add_process_set"
        with pytest.raises(ConfigError, match=message):
            setup.distributed(task, hierarchical())
        assert torch.equal(bits(task.parameters()), before)
    hvd.remove_process_set(trio)


def trained_by_auto(**settings: Any) -> Any:
    """An optimizer after three steps; ranks are equal."""
    setup = Setup(build=training.Branches)
    task = setup.task()
    optimizer = setup.distributed(task, hierarchical(exchange="auto", **settings))
    for step in range(3):
        training.ordinary(task, optimizer, step)
    assert_ranks_equal(task.parameters())
    return optimizer


@pytest.mark.world_size(2, 3, 4)
def test_auto_takes_what_sends_least(placed: Placing) -> None:
    """And says which and why; a NaN, a state and equal ranks are as with that one."""
    placed(usual_nodes())
    optimizer = trained_by_auto(values="int8")
    stats = TopKEF.of(optimizer).stats()
    assert stats.because.startswith("bytes a step that leave the busiest node: allgather ")
    assert f"{stats.exchange} {stats.node_bytes:,}" in stats.because
    expected = {2: "allgather", 3: "hierarchical", 4: "hierarchical"}
    assert stats.exchange == expected[hvd.size()]
    TopKEF.of(optimizer).load_state_dict(TopKEF.of(optimizer).state_dict())


@pytest.mark.world_size(4)
def test_auto_with_adapted_steps_does_without_nodes(placed: Placing) -> None:
    placed(usual_nodes())
    stats = TopKEF.of(trained_by_auto(momentum="auto")).stats()
    assert stats.exchange in ("allgather", "sharded")
    assert "hierarchical" not in stats.because


@pytest.mark.horovod
@pytest.mark.world_size(4)
def test_process_sets_that_are_there_are_used(placed: Placing) -> None:
    """Horovod refuses a second one of the same ranks."""
    mine = hvd.add_process_set([0, 3])
    placed([[0, 3], [1, 2]])
    for _ in range(2):
        task = Setup().task()
        optimizer = Setup().distributed(task, hierarchical())
        training.ordinary(task, optimizer, 0)
        assert_ranks_equal(task.parameters())
    assert TopKEF.of(optimizer).stats().nodes == (2, 2)
    assert hvd.remove_process_set(mine)
