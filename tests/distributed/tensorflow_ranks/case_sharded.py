"""The sharded exchange in TensorFlow: equal bits, nothing lost, checkpoints of owners too."""

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

from horovod_topk.errors import ShapeChangedError, StateDictError
from plain import PlainTopKEF as TopKEF

SHAPES = [(60, 50), (7,), (515,)]


def sharded(**settings: Any) -> TopKEF:
    return TopKEF(**{"ratio": 0.1, "min_numel": 0, "exchange": "sharded", **settings})


def gradients(step: int) -> list[Any]:
    return [noise(hvd.rank(), 10 * step + i, shape) for i, shape in enumerate(SHAPES)]


@pytest.mark.one_in(6)
@pytest.mark.everywhere
@pytest.mark.world_size(2, 3, 4)
@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("values", ["float32", "int8", "sign"])
def test_applied_and_owed_are_the_sum_of_all_means(values: str, graph: bool) -> None:
    compression, model = sharded(values=values, ratio=(0.1, 0.05)), Linear(SHAPES)
    applied, given = ([np.zeros(shape) for shape in SHAPES] for _ in range(2))
    for step in range(4):
        mine = gradients(step)
        exchanged = model.exchange(compression, mine, graph=graph)
        assert_ranks_equal(exchanged)
        for i, g in enumerate(mine):
            applied[i] += exchanged[i]
            given[i] += hvd.allreduce(g, name=f"given.{i}").numpy()
    for i, (name, left) in enumerate(kept(compression).items()):
        np.testing.assert_allclose(
            applied[i].ravel() + left, given[i].ravel(), atol=2e-5, err_msg=name
        )
        assert left.any()


def kept(compression: TopKEF) -> dict[str, Any]:
    """Mean of the ranks' residuals, and the owners' at their elements."""
    state, total = compression.state_dict(), {}
    for name, residual in state["residuals"].items():
        block = np.arange(residual.shape[0]) // 512
        first = (hvd.rank() - zlib.crc32(name.encode())) % hvd.size()
        own = np.zeros(residual.shape[0], np.float32)
        own[block % hvd.size() == first] = state["owned"]["residuals"][name].numpy()
        mean = hvd.allreduce(residual, name=f"mean.{name}").numpy()
        total[name] = mean + hvd.allreduce(own, op=hvd.Sum, name=f"own.{name}").numpy()
    return total


@pytest.mark.everywhere
def test_dense_at_ratio_one() -> None:
    ours = train(sharded(ratio=1.0), steps=FEW)
    dense = train(hvd.Compression.none, steps=FEW)
    for mine, theirs in zip(ours[-1], dense[-1], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.everywhere
@pytest.mark.world_size(2, 3)
def test_an_infinity_leaves_all_residuals_as_they_were() -> None:
    compression, model = sharded(values="int8"), Linear(SHAPES)
    model.exchange(compression, gradients(0))
    before = copies(compression.state_dict())
    mine = gradients(1)
    if hvd.rank() == 0:
        mine[0] = tf.tensor_scatter_nd_update(mine[0], [[59, 49]], [np.inf])
    exchanged = model.exchange(compression, mine)
    assert np.isnan(exchanged[0]).all()
    assert np.isfinite(exchanged[1]).all()
    assert all(map(np.array_equal, copies(compression.state_dict()), before))


def test_norms_of_what_a_rank_keeps_and_of_what_it_owns_are_apart() -> None:
    compression, model = sharded(values="int8"), Linear(SHAPES)
    model.exchange(compression, gradients(0))
    stats, state = compression.stats(), compression.state_dict()
    for found, part in ((stats.residual_norm, state), (stats.owned_norm, state["owned"])):
        flat = np.concatenate([np.ravel(each) for each in part["residuals"].values()])
        assert found == pytest.approx(np.linalg.norm(flat), rel=1e-5)
        assert found > 0


def copies(state: Any) -> list[Any]:
    kinds = (state["residuals"], state["owned"]["residuals"])
    return [residual.numpy() for residuals in kinds for residual in residuals.values()]


def test_a_checkpoint_carries_a_run_over(tmp_path: Path) -> None:
    first, second = sharded(values="int4"), sharded(values="int4")
    model, other = Linear(SHAPES), Linear(SHAPES)
    for step in range(3):
        model.exchange(first, gradients(step))
    path = tf.train.Checkpoint(compression=first).save(str(tmp_path / "ckpt"))
    tf.train.Checkpoint(compression=second).restore(path).assert_consumed()
    expected = model.exchange(first, gradients(3))
    assert all(map(np.array_equal, other.exchange(second, gradients(3)), expected))
    assert all(map(np.array_equal, copies(second.state_dict()), copies(first.state_dict())))


def some_of(model: Linear, *positions: int) -> Linear:
    """The same variables, some of them."""
    part = Linear([])
    part.variables = [model.variables[i] for i in positions]
    return part


@pytest.mark.one_in(2)
@pytest.mark.parametrize("settings", [{"exchange": "sharded"}, {"exchange": "allgather"}], ids=str)
def test_what_was_loaded_waits_for_the_step_that_asks_for_it(settings: Any) -> None:
    """A variable without a gradient, a save in between, and then both."""
    first, second, third = (TopKEF(ratio=0.1, min_numel=0, **settings) for _ in range(3))
    model, other, last = (Linear(SHAPES[:2]) for _ in range(3))
    for step in range(3):
        model.exchange(first, gradients(step)[:2])
    state = first.state_dict()
    second.load_state_dict(state)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(other.variables[0] * gradients(3)[0])
    tape = hvd.DistributedGradientTape(tape, compression=second)
    assert tape.gradient(loss, other.variables)[1] is None
    again = second.state_dict()
    assert set(again["residuals"]) == set(state["residuals"])
    third.load_state_dict(again)
    expected = other.exchange(second, gradients(4)[:2])
    assert all(map(np.array_equal, last.exchange(third, gradients(4)[:2]), expected))


def test_a_variable_in_two_lists_under_two_names_is_refused() -> None:
    """Its residual is split by its name: read by another, elements would go astray."""
    compression, model = sharded(), Linear([(600,), (600,)])
    model.exchange(compression, [noise(hvd.rank(), i, (600,)) for i in range(2)])
    with pytest.raises(ShapeChangedError, match=r"is split as .*names of their own"):
        some_of(model, 1).exchange(compression, [noise(hvd.rank(), 3, (600,))])


def test_a_wrong_state_is_refused_at_once() -> None:
    compression, model = sharded(), Linear(SHAPES)
    model.exchange(compression, gradients(0))
    before = copies(compression.state_dict())
    state = compression.state_dict()
    state["owned"]["residuals"].popitem()
    with pytest.raises(StateDictError, match="has no residual for it"):
        compression.load_state_dict(state)
    assert all(map(np.array_equal, copies(compression.state_dict()), before))
    other = compression.state_dict()
    other["owned"]["rank"] = 1 - hvd.rank()
    with pytest.raises(StateDictError, match="that own shards, this is rank"):
        compression.load_state_dict(other)
