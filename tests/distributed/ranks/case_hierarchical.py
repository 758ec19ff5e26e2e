"""The hierarchical exchange between real ranks, on nodes that a case makes up or the launcher has.

Two ranks make up a node each, or one together; three are on nodes of two and one, four on two nodes
of two. Process sets and collectives are Horovod's; only where a rank says it runs is made up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import training
from horovod_topk.core.plan.nodes import Location
from horovod_topk.errors import ConfigError
from plain import PlainTopKEF as TopKEF
from training import Setup
from witness import assert_ranks_equal, bits
from world import hvd, place

pytestmark = pytest.mark.everywhere

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
    task, optimizer = Setup().start(hierarchical())
    training.ordinary(task, optimizer, 0)
    stats = TopKEF.of(optimizer).stats()
    assert (stats.nodes, stats.between_bytes) == ((2,), 0)
    assert stats.because.startswith("one node")


@pytest.mark.horovod
@pytest.mark.world_size(3)
def test_an_optimizer_of_a_process_set_uses_its_ranks(placed: Placing, pair: Any) -> None:
    placed([[0], [1, 2]])
    if hvd.rank() > 1:
        return
    setup = Setup(options={"process_set": pair})
    task, optimizer = setup.start(hierarchical())
    training.ordinary(task, optimizer, 0)
    assert_ranks_equal(task.parameters(), pair)
    assert TopKEF.of(optimizer).stats().nodes == (1, 1)


@pytest.mark.horovod
@pytest.mark.world_size(4)
def test_a_process_set_that_others_would_have_to_add_is_an_error(placed: Placing) -> None:
    trio = hvd.add_process_set([0, 1, 2])
    placed([[1, 2], [0, 3]])
    if hvd.rank() < 3:
        setup = Setup(options={"process_set": trio})
        task = setup.task()
        before = bits(task.parameters()).clone()
        message = r"among ranks such as \[1, 2\].*rank 0 cannot add one.*hvd.add_process_set"
        with pytest.raises(ConfigError, match=message):
            setup.distributed(task, hierarchical())
        assert torch.equal(bits(task.parameters()), before)
    hvd.remove_process_set(trio)


def trained_by_auto(**settings: Any) -> Any:
    """An optimizer after three steps; ranks are equal."""
    setup = Setup(build=training.Branches)
    task, optimizer = setup.start(hierarchical(exchange="auto", **settings))
    training.train(task, optimizer, range(3))
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
        task, optimizer = Setup().start(hierarchical())
        training.ordinary(task, optimizer, 0)
        assert_ranks_equal(task.parameters())
    assert TopKEF.of(optimizer).stats().nodes == (2, 2)
    assert hvd.remove_process_set(mine)
