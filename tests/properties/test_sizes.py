"""Laws 1 to 6 at two, three, four and eight ranks, with each exchange, on the same gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from oracle.backends import NUMPY
from oracle.world import Gradients, World, same_bits

from horovod_topk.core.plan.buckets import TensorSpec, make_plan
from horovod_topk.core.state.reshard import pending
from horovod_topk.methods.topk import TopK

SPECS = [TensorSpec("conv", (60, 50), "float32"), TensorSpec("bias", (60,), "float32")]
SPECS += [TensorSpec("odd", (1031,), "float32")]
GROUPS = (tuple(SPECS[:2]), tuple(SPECS[2:]))  # two buckets

pytestmark = [
    pytest.mark.parametrize("ranks", [2, 3, 4, 8]),
    pytest.mark.parametrize("exchange", ["allgather", "sharded", "hierarchical"]),
]


def world_of(ranks: int, exchange: str, **settings: Any) -> World:
    given = {"ratio": 0.02, "values": "int8", "min_numel": 100, **settings}
    config = TopK(exchange=exchange, **given)
    return World(make_plan(SPECS, config, "average", GROUPS), ranks, NUMPY)


def gradients_of(ranks: int, step: int) -> list[Gradients]:
    random = np.random.default_rng(step)
    return [
        {spec.name: random.standard_normal(spec.shape).astype(np.float32) for spec in SPECS}
        for _ in range(ranks)
    ]


def mean(gradients: list[Gradients], name: str) -> Any:
    return np.mean([one[name].astype(np.float64) for one in gradients], 0)


def kept(world: World) -> list[Gradients]:
    return [*world.residuals(), *world.owned()]


def test_what_was_applied_and_what_is_owed_are_what_was_given(exchange: str, ranks: int) -> None:
    world = world_of(ranks, exchange, gather_ratio=0.01 if exchange == "sharded" else None)
    total = {spec.name: np.zeros(spec.shape) for spec in SPECS}  # given, less what was applied
    for step in range(4):
        gradients = gradients_of(ranks, step)
        exchanged = world.step(gradients)[0]
        for name, sums in total.items():
            sums += mean(gradients, name) - exchanged[name]
    owed = pending([rank.state_dict() for rank in world.ranks], ranks, "average", NUMPY.ops)
    for name, sums in total.items():
        np.testing.assert_allclose(owed[name], sums.reshape(-1), atol=1e-5)
        assert owed[name].any()


def test_every_rank_has_the_same_bits(exchange: str, ranks: int) -> None:
    world = world_of(ranks, exchange)
    for step in range(3):
        exchanged = world.step(gradients_of(ranks, step))
        assert same_bits(exchanged, [exchanged[0]] * ranks)


def test_ratio_one_is_the_dense_mean(exchange: str, ranks: int) -> None:
    world = world_of(ranks, exchange, ratio=1.0, values="float32")
    for step in range(2):
        gradients = gradients_of(ranks, step)
        exchanged = world.step(gradients)
        for spec in SPECS:
            dense = mean(gradients, spec.name)
            np.testing.assert_allclose(exchanged[0][spec.name], dense, rtol=1e-6, atol=1e-6)
    assert not any(e.any() for one in kept(world) for e in one.values())


def test_sizes_and_names_are_the_same_in_every_step(exchange: str, ranks: int) -> None:
    """Whatever is in the gradients: zeros and infinities too."""
    world = world_of(ranks, exchange)
    world.step(gradients_of(ranks, 0))
    first = [sent(world, rank) for rank in range(ranks)]
    for one in first:
        assert one and len({name for name, _ in one}) == len(one)
    for fill in (0.0, np.inf):
        world.step(
            [{name: np.full_like(g, fill) for name, g in gradients_of(1, 0)[0].items()}] * ranks
        )
    assert [sent(world, rank) for rank in range(ranks)] == [sorted(one * 3) for one in first]


def sent(world: World, rank: int) -> list[tuple[str, int]]:
    return sorted((name, len(payload)) for name, payload in world.payloads(rank))


def test_an_infinity_on_one_rank_rolls_the_step_back_on_all(exchange: str, ranks: int) -> None:
    world = world_of(ranks, exchange)
    world.step(gradients_of(ranks, 0))
    before, gradients = kept(world), gradients_of(ranks, 1)
    gradients[-1]["odd"][70] = np.inf
    exchanged = world.exchange(gradients)
    assert world.commit() == [False] * ranks
    assert all(np.isnan(one["odd"]).all() and np.isfinite(one["conv"]).all() for one in exchanged)
    assert same_bits(kept(world), before)
