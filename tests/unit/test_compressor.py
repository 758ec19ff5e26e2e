"""What the compressor offers around the algorithm: state, statistics, replanning."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from oracle.backends import NUMPY, Backend, each_backend
from oracle.world import World, drawn, same_bits

from horovod_topk.core.plan.buckets import TensorSpec, make_plan
from horovod_topk.core.run.stats import measured
from horovod_topk.errors import StateDictError
from horovod_topk.methods.topk import TopK

A = TensorSpec("a", (50,), "float32")
B = TensorSpec("b", (50,), "float64")
ALIKE = [A, replace(B, dtype="float32")]
CONFIG = TopK(ratio=0.1, min_numel=0)


def world(ranks: int = 2, backend: Backend = NUMPY) -> World:
    """Two buckets, of which five elements each are sent."""
    return World(make_plan([A, B], CONFIG), ranks, backend)


def some_gradients(seed: int, ranks: int = 2) -> list[dict[str, Any]]:
    return drawn([A, B], ranks, seed)


def norm(gradients: dict[str, Any]) -> float:
    return float(np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in gradients.values())))


# State


@pytest.mark.parametrize("received", [False, True])
def test_loading_abandons_a_step_under_way(received: bool) -> None:
    job = world()
    state = [compressor.registry.state_dict(0.01) for compressor in job.ranks]
    job.launch(some_gradients(0))
    if received:
        job.finish()
    for compressor, one in zip(job.ranks, state, strict=True):
        assert 0 in (compressor.step.received if received else compressor.step.sent)
        compressor.load_state_dict(one)
        assert not compressor.step.sent | compressor.step.received
    assert job.commit() == [False, False]
    assert not any(e.any() for one in job.residuals() for e in one.values())


def test_a_refused_state_leaves_the_step_under_way_alone() -> None:
    job = world()
    job.exchange(some_gradients(0))
    with pytest.raises(StateDictError):
        job.ranks[0].load_state_dict({"version": 1, "shapes": {}, "residuals": {}})
    assert job.commit() == [True, True]


def test_reset_clears_residuals_and_abandons_a_step() -> None:
    job = world()
    job.step(some_gradients(0))
    job.exchange(some_gradients(1))
    for compressor in job.ranks:
        compressor.reset()
    assert job.commit() == [False, False]
    assert not any(e.any() for one in job.residuals() for e in one.values())


@each_backend
def test_gradients_can_be_delivered_elsewhere(backend: Backend) -> None:
    """`targets` receive; what was launched stays as it was."""
    elsewhere, in_place = world(1, backend), world(1, backend)
    gradients = some_gradients(0, ranks=1)
    expected = in_place.exchange(gradients)[0]["a"]
    elsewhere.launch(gradients)
    launched, target = elsewhere._arrays[0]["a"], backend.array(np.ones(50), "float32")
    elsewhere.ranks[0].step.finish({0: [target]})
    assert backend.numpy(target).tobytes() == expected.tobytes()
    assert backend.numpy(launched).tobytes() == gradients[0]["a"].tobytes()


# Statistics


@each_backend
@pytest.mark.parametrize("ending", ["open", "commit", "rollback"])
def test_norms_of_the_residual_and_of_the_last_gradient(backend: Backend, ending: str) -> None:
    job = world(1, backend)
    compressor = job.ranks[0]
    assert compressor.norm("residuals") == compressor.squares().gradient ** 0.5 == 0.0
    for seed in range(3):
        gradients = some_gradients(seed, ranks=1)
        job.step(gradients)
        assert compressor.squares().gradient ** 0.5 == pytest.approx(norm(gradients[0]), rel=1e-5)
        assert compressor.norm("residuals") == pytest.approx(norm(job.residuals()[0]), rel=1e-12)
    gradients = some_gradients(3, ranks=1)
    job.exchange(gradients)
    if ending != "open":
        getattr(job, ending)()
    assert compressor.squares().gradient ** 0.5 == pytest.approx(norm(gradients[0]), rel=1e-5)


@each_backend
@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
def test_share_of_the_squares_that_was_sent(backend: Backend, exchange: str) -> None:
    job = World(make_plan([A, B], replace(CONFIG, exchange=exchange)), 2, backend)
    assert measured(job.ranks[0].squares())["sent_share"] is None
    for seed in range(3):
        before, gradients = job.residuals()[0], some_gradients(seed, job.size)
        job.step(gradients)
        whole = {name: before[name] + gradients[0][name] for name in before}
        share = 1.0 - (norm(job.residuals()[0]) / norm(whole)) ** 2
        assert 0.0 < share < 1.0
        assert measured(job.ranks[0].squares())["sent_share"] == pytest.approx(share, rel=1e-5)


# Replanning


@each_backend
def test_replan_drops_a_tensor_and_keeps_what_others_owe(backend: Backend) -> None:
    less, never = (World(make_plan(some, CONFIG), 2, backend) for some in (ALIKE, ALIKE[:1]))
    gradients = [drawn(ALIKE, 2, seed) for seed in range(3)]
    less.step(gradients[0])
    never.step(gradients[0])
    less.plan = less.plan.without("b")
    for compressor in less.ranks:
        compressor.replan(less.plan)
    for one in gradients[1:]:
        assert same_bits(less.step(one), never.step(one))
    assert same_bits(less.residuals(), never.residuals())


def test_replan_waits_for_collectives_that_nobody_will_read() -> None:
    """A collective left behind would hold its buffers, and on MPI its turn."""
    job = World(make_plan(ALIKE, CONFIG), 1, NUMPY)
    job.launch(drawn(ALIKE, 1, 0))
    job.ranks[0].replan(job.plan.without("b"))
    assert job.network.awaited[0] == ["job.0.0"]


def test_abandoned_steps_leave_no_collective_behind() -> None:
    """Each is waited for before its name is used again."""
    config = TopK(0.1, min_numel=0, exchange="sharded")
    job = World(make_plan([TensorSpec("a", (300,), "float32")], config), 2, NUMPY)
    gradients = [{"a": np.arange(300, dtype=np.float32) + rank} for rank in range(2)]
    for _ in range(3):
        job.launch(gradients)
        for one in job.ranks:
            one.abandon()
    job.step(gradients)
    for rank in range(2):
        started = sorted(message.name for message in job.network.sent[rank])
        assert len(started) == 8
        assert sorted(job.network.awaited[rank]) == started


def test_a_state_of_other_units_or_shapes_is_refused() -> None:
    """Owners of a node's sums keep their parts flat, in which another shape does not show."""
    config = TopK(0.1, min_numel=0, exchange="hierarchical")
    plans = {
        (shape, reduction): make_plan([TensorSpec("a", shape, "float32")], config, reduction)
        for shape, reduction in (((20, 15), "average"), ((15, 20), "average"), ((20, 15), "sum"))
    }
    one, turned, summed = (World(plan, 2, NUMPY).ranks[0] for plan in plans.values())
    noted = one.state_dict() | {"tensors": {"a": [20, 15]}, "reduction": "average"}
    one.load_state_dict(noted)
    with pytest.raises(StateDictError, match=r"'a': .*\[20, 15\], the gradient's is \[15, 20\]"):
        turned.load_state_dict(noted)
    with pytest.raises(StateDictError, match=r"reduced to their average, these .* to their sum"):
        summed.load_state_dict(noted)


@pytest.mark.parametrize(("values", "warns"), [("float16", True), ("bfloat16", False)])
def test_gradients_that_float16_cannot_hold_are_a_warning(values: str, warns: bool) -> None:
    job = World(make_plan([A], TopK(ratio=0.1, min_numel=0, values=values)), 2, NUMPY)
    for step in range(18):  # one step in 16 is sampled, and read in the next
        job.step([{"a": 1e6 * one["a"]} for one in some_gradients(step)])
    warnings = job.ranks[0].stats().warnings
    assert [each.startswith("values='float16' sends at most 65,504") for each in warnings] == (
        [True] if warns else []
    )
