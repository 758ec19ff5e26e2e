"""Random-K's own laws: which elements are drawn, unbiasedness, variance, contraction."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from oracle.backends import NUMPY
from oracle.world import World

from horovod_topk.core.plan.buckets import TensorSpec, make_plan
from horovod_topk.methods import RandomK

SIZE, STEPS = 401, 1000
Array = NDArray[Any]


def world_of(ranks: int = 1, size: int = SIZE, **settings: Any) -> World:
    specs = [TensorSpec("w", (size,), "float32")]
    return World(make_plan(specs, RandomK(min_numel=0, **settings)), ranks, NUMPY)


def applied(world: World, gradient: Array, steps: int) -> Array:
    """Run some steps and return the gradient that each applies: [steps, n]."""
    given = [{"w": gradient}] * world.size
    return np.stack([world.step(given)[0]["w"] for _ in range(steps)])


def gradient_of(size: int = SIZE) -> Array:
    return np.random.default_rng(3).standard_normal(size).astype(np.float32) + 0.1


@pytest.mark.one_in(3, first=2)
@pytest.mark.parametrize("ratio", [0.01, 0.25, 0.5])
def test_without_error_feedback_the_mean_over_steps_is_the_gradient(ratio: float) -> None:
    """Within 5 standard errors, and of the variance that the docstring says."""
    g, world = gradient_of(), world_of(ratio=ratio, error_feedback=False)
    seen = applied(world, g, STEPS)
    expected = (SIZE / np.ceil(ratio * SIZE) - 1) * g**2
    error = np.sqrt(expected / STEPS)
    assert (abs(seen.mean(0) - g) < 5 * error + 1e-6).all()
    assert seen.var(0).sum() == pytest.approx(expected.sum(), rel=0.05)
    assert not any(one["w"].any() for one in world.residuals())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("ratio", [0.01, 0.3])
def test_it_contracts_by_the_share_that_is_sent(ratio: float) -> None:
    g = gradient_of()
    left = []
    for seed in range(100):
        world = world_of(ratio=ratio, seed=seed)
        world.step([{"w": g}])
        left.append(np.square(world.residuals()[0]["w"]).sum())
    share = np.ceil(ratio * SIZE) / SIZE
    assert np.mean(left) == pytest.approx((1 - share) * np.square(g).sum(), rel=0.02)


@pytest.mark.parametrize(("size", "k"), [(401, 5), (401, 401 // 2 + 1), (7, 1), (12, 6)])
def test_one_element_of_each_stretch_is_drawn(size: int, k: int) -> None:
    """Each element is drawn equally often, so that the mean over steps is the gradient."""
    world = world_of(size=size, ratio=(k - 0.5) / size)
    g, ends = np.ones(size, np.float32), np.arange(k + 1) * size // k
    for step in range(20):
        before = world.residuals()[0]["w"]
        world.step([{"w": g}])
        drawn = np.flatnonzero(world.residuals()[0]["w"] != before + g)
        assert (np.searchsorted(ends, drawn, "right") - 1 == np.arange(k)).all(), step
