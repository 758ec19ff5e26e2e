"""The hierarchical exchange in TensorFlow, on nodes that a case makes up.

Process sets and collectives are Horovod's; only where a rank says it runs is made up: three ranks
on nodes of two and one, four on two nodes of two, two on a node each.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from proof import assert_ranks_equal
from tapes import FEW, Linear, noise, train

from horovod_topk.core.plan.nodes import Location
from horovod_topk.errors import StateDictError
from plain import PlainTopKEF as TopKEF

SHAPES = [(60, 50), (7,), (515,)]


@pytest.fixture(autouse=True)
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Two nodes of all ranks, the first the larger one."""
    first = -(-hvd.size() // 2)
    nodes = [list(range(first)), list(range(first, hvd.size()))]
    here = Location("host", 0, int(hvd.rank() >= first))
    monkeypatch.setattr("horovod_topk.process_sets.location", lambda rank, local: here)
    return nodes


def hierarchical(**settings: Any) -> TopKEF:
    return TopKEF(**{"ratio": 0.1, "min_numel": 0, "exchange": "hierarchical", **settings})


def gradients(step: int) -> list[Any]:
    return [noise(hvd.rank(), 10 * step + i, shape) for i, shape in enumerate(SHAPES)]


@pytest.mark.one_in(3)
@pytest.mark.everywhere
@pytest.mark.world_size(2, 3, 4)
@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("values", ["float32", "int8"])
def test_applied_and_owed_are_the_sum_of_all_means(
    values: str, graph: bool, nodes: list[list[int]]
) -> None:
    compression, model = hierarchical(values=values), Linear(SHAPES)
    applied, given = ([np.zeros(shape) for shape in SHAPES] for _ in range(2))
    for step in range(4):
        mine = gradients(step)
        exchanged = model.exchange(compression, mine, graph=graph)
        assert_ranks_equal(exchanged)
        for i, g in enumerate(mine):
            applied[i] += exchanged[i]
            given[i] += hvd.allreduce(g, name=f"given.{i}").numpy()
    for i, left in enumerate(kept(compression, nodes)):
        np.testing.assert_allclose(applied[i].ravel() + left, given[i].ravel(), atol=2e-5)
        assert left.any()


def kept(compression: TopKEF, nodes: list[list[int]]) -> list[Any]:
    """What all owners keep, at its elements, in units of the mean."""
    state, owners = compression.state_dict(), min(map(len, nodes))
    assert not state["residuals"]
    owned = state["owned"]["residuals"]
    position = next(node.index(hvd.rank()) for node in nodes if hvd.rank() in node)
    total = []
    for ordinal, shape in enumerate(SHAPES):
        name = "v" if ordinal == 0 else f"v#{ordinal + 1}"
        own = np.zeros(np.prod(shape), np.float32)
        if position < owners:  # from the docstring of `core.shards`
            mine = np.arange(own.size) // 512 % owners
            own[mine == (position - zlib.crc32(name.encode())) % owners] = owned[name].numpy()
        else:
            assert not owned
        total.append(hvd.allreduce(own, name=f"own.{name}").numpy())
    return total


@pytest.mark.everywhere
@pytest.mark.world_size(2, 3)
def test_dense_at_ratio_one() -> None:
    ours = train(hierarchical(ratio=1.0), steps=FEW)
    dense = train(hvd.Compression.none, steps=FEW)
    for mine, theirs in zip(ours[-1], dense[-1], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.everywhere
@pytest.mark.world_size(2, 3, 4)
def test_an_infinity_leaves_all_residuals_as_they_were() -> None:
    """Also of a rank that owns nothing: the second of three."""
    compression, model = hierarchical(values="int8"), Linear(SHAPES)
    model.exchange(compression, gradients(0))
    before = copies(compression.state_dict())
    mine = gradients(1)
    if hvd.rank() == 1:
        mine[0] = tf.tensor_scatter_nd_update(mine[0], [[59, 49]], [np.inf])
    exchanged = model.exchange(compression, mine)
    assert np.isnan(exchanged[0]).all()
    assert np.isfinite(exchanged[1]).all()
    assert all(map(np.array_equal, copies(compression.state_dict()), before))


def copies(state: Any) -> list[Any]:
    return [residual.numpy() for residual in state["owned"]["residuals"].values()]


@pytest.mark.world_size(2, 3)
def test_a_checkpoint_carries_a_run_over(tmp_path: Path) -> None:
    first, second = hierarchical(values="int4"), hierarchical(values="int4")
    model, other = Linear(SHAPES), Linear(SHAPES)
    for step in range(3):
        model.exchange(first, gradients(step))
    path = tf.train.Checkpoint(compression=first).save(str(tmp_path / "ckpt"))
    tf.train.Checkpoint(compression=second).restore(path).assert_consumed()
    expected = model.exchange(first, gradients(3))
    assert all(map(np.array_equal, other.exchange(second, gradients(3)), expected))
    assert all(map(np.array_equal, copies(second.state_dict()), copies(first.state_dict())))


def test_the_state_of_another_rank_is_refused() -> None:
    compression, model = hierarchical(), Linear(SHAPES)
    model.exchange(compression, gradients(0))
    before = copies(compression.state_dict())
    state = compression.state_dict()
    state["owned"]["rank"] = 1 - hvd.rank()
    with pytest.raises(StateDictError, match=r"on nodes \[\[0\], \[1\]\], this is rank"):
        compression.load_state_dict(state)
    early = hierarchical()
    early.load_state_dict(state)  # nothing is known of nodes yet
    with pytest.raises(StateDictError, match=r"on nodes \[\[0\], \[1\]\], this is rank"):
        Linear(SHAPES).exchange(early, gradients(1))
    assert all(map(np.array_equal, copies(compression.state_dict()), before))


@pytest.mark.world_size(3, 4)
def test_stats_say_how_it_travels(nodes: list[list[int]]) -> None:
    compression, model = hierarchical(values="int8"), Linear(SHAPES)
    model.exchange(compression, gradients(0), graph=True)
    stats, owners = compression.stats(), min(map(len, nodes))
    assert (stats.exchange, stats.ranks) == ("hierarchical", hvd.size())
    assert stats.nodes == tuple(map(len, nodes))
    owns = hvd.rank() in [rank for node in nodes for rank in node[:owners]]
    assert stats.node_bytes is not None
    assert stats.between_bytes == (stats.node_bytes // owners if owns else 0)
    assert (stats.owned_norm > 0) == owns
    assert stats.residual_norm == 0


@pytest.mark.world_size(2, 4)
def test_auto_takes_what_sends_least() -> None:
    """And says which and why; a checkpoint taken before the first step waits for the choice."""
    compression, other = (hierarchical(exchange="auto", values="int8") for _ in range(2))
    model = Linear(SHAPES)
    model.exchange(compression, gradients(0), graph=True)
    stats = compression.stats()
    assert stats.exchange == {2: "allgather", 4: "hierarchical"}[hvd.size()]
    assert f"{stats.exchange} {stats.node_bytes:,}" in stats.because
    other.load_state_dict(compression.state_dict())
    expected = model.exchange(compression, gradients(1))
    assert all(map(np.array_equal, Linear(SHAPES).exchange(other, gradients(1)), expected))
