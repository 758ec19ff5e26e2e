"""Test SignSGD: its contraction bound, the majority vote, and the settings it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from oracle.backends import NUMPY, TENSORFLOW, TORCH, Backend
from oracle.world import World

from horovod_topk.core.plan.buckets import TensorSpec, make_plan
from horovod_topk.errors import ConfigError
from horovod_topk.methods import SignSGD

SIZE = 2500


def world_of(ranks: int, backend: Backend = NUMPY, op: str = "average", **settings: Any) -> World:
    specs = [TensorSpec("w", (SIZE,), "float32")]
    return World(make_plan(specs, SignSGD(min_numel=0, **settings), op), ranks, backend)


def gradient_of(seed: int = 3) -> Any:
    random = np.random.default_rng(seed)
    return (random.standard_normal(SIZE) * random.exponential(2.0, SIZE)).astype(np.float32)


def test_it_contracts_by_the_share_of_its_paper() -> None:
    """Karimireddy et al. 2019, lemma 8, block by block, with a scale rounded to 8 bits."""
    world, g = world_of(1), gradient_of()
    world.step([{"w": g}])
    left = world.residuals()[0]["w"].astype(float)
    for at in range(0, SIZE, 1024):
        block, rest = g[at : at + 1024].astype(float), left[at : at + 1024]
        square = np.square(block).sum()
        share = np.abs(block).sum() ** 2 / (block.size * square)
        assert np.square(rest).sum() == pytest.approx((1 - share) * square, rel=1e-4)


@pytest.mark.parametrize("op", ["average", "sum"])
@pytest.mark.parametrize("backend", [NUMPY, TORCH, TENSORFLOW], ids=lambda each: each.name)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_majority_decides(backend: Backend, ranks: int, op: str) -> None:
    """Ties are 0; a gradient of 0 votes for +1."""
    world = world_of(ranks, backend, op, majority=True)
    gradients = [gradient_of(seed) for seed in range(ranks)]
    for g in gradients:
        g[:5] = 0
    votes = sum(np.where(g < 0, -1, 1) for g in gradients)
    for applied in world.step([{"w": g} for g in gradients]):
        assert np.array_equal(applied["w"], np.sign(votes) * (ranks if op == "sum" else 1))
    assert not any(one["w"].any() for one in world.residuals())


def test_a_vote_is_counted_where_all_of_it_arrives() -> None:
    with pytest.raises(ConfigError, match="sharded"):
        SignSGD(majority=True, exchange="sharded")
    with pytest.raises(ConfigError, match="clipping changes no sign"):
        SignSGD(majority=True, clip_norm=1.0)
    with pytest.raises(ConfigError, match="majority=1 is neither"):
        SignSGD(majority=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("majority", [False, True])
def test_dense_is_a_level(majority: bool) -> None:
    world, g = world_of(2, majority=majority, warmup=((1, 1.0),)), gradient_of()
    assert np.array_equal(world.step([{"w": g}] * 2)[0]["w"], g)
    world.step([{"w": g}] * 2)
    left = world.residuals()[0]["w"]
    assert left.any() != majority
    for rank in world.ranks:
        rank.set_ratio(1.0)
    np.testing.assert_allclose(world.step([{"w": g}] * 2)[0]["w"], g + left, rtol=1e-6)
    assert not world.residuals()[0]["w"].any()


def test_it_has_no_other_levels() -> None:
    with pytest.raises(ConfigError, match=r"ratio 0\.1 was asked of SignSGD"):
        SignSGD(warmup=((10, 0.1),))
    with pytest.raises(ConfigError, match=r"ratio 0\.1 was asked of SignSGD, which has none"):
        SignSGD(ratios=(("w", 0.1),))
    with pytest.raises(ConfigError, match=r"ratio 0\.5 was asked of SignSGD"):
        SignSGD(warmup=((10, 0.5),))
    with pytest.raises(ConfigError, match="warmup=10 was given to SignSGD"):
        SignSGD(warmup=10)
    SignSGD(ratios=(("w", 1.0),), warmup=((10, 1.0),))
