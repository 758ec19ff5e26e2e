"""Test Threshold: sent elements, levels decided from all ranks' counts, and wrong settings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from oracle.backends import NUMPY, Backend
from oracle.world import Gradients, World, same_bits

from horovod_topk.core.plan.buckets import TensorSpec, make_plan
from horovod_topk.methods import Threshold, TopK
from horovod_topk.methods.threshold import Filled

RANKS = 3
SPECS = [
    TensorSpec("w", (50, 60), "float32"),
    TensorSpec("few", (5,), "float32"),  # sent whole
    TensorSpec("v", (40, 30), "float64"),  # in a bucket of its own
]
Array = NDArray[Any]


def world_of(backend: Backend = NUMPY, **settings: Any) -> World:
    settings = {"max_ratio": 0.08, "values": "float32", "min_numel": 8, **settings}
    return World(make_plan(SPECS, Threshold(**settings)), RANKS, backend)


def gradients(step: int, heavy: float = 0.0) -> list[Gradients]:
    """Normally distributed gradients of all ranks; a share `heavy` is ten times as large."""
    random = np.random.default_rng(step)
    return [
        {
            s.name: (
                random.standard_normal(s.shape)
                * np.where(random.random(s.shape) < heavy, 10.0, 1.0)
            ).astype(s.dtype)
            for s in SPECS
        }
        for _ in range(RANKS)
    ]


def above(values: Array, threshold: float, *, relative: bool) -> Array:
    """Positions of elements above `threshold` in magnitude, in root mean squares if `relative`."""
    scale = np.sqrt(np.mean(np.square(values.astype(np.float64)))) if relative else 1.0
    return np.flatnonzero(np.abs(values) > threshold * scale)


def level_of(counts: list[int], numel: int, most: float) -> float:
    """The smallest of `most`, `most` / 2, ... `most` / 16 that has room for the largest count."""
    fitting = [most / 2**i for i in range(5) if most / 2**i * numel >= max(counts)]
    return min(fitting, default=most)


def levels(world: World) -> list[float]:
    """The ratio of the next step on each rank."""
    return [compressor.ratio for compressor in world.ranks]


@pytest.mark.parametrize(("threshold", "relative"), [(2.0, True), (3.5, True), (2.5, False)])
@pytest.mark.parametrize("exchange", ["allgather", "sharded", "hierarchical"])
def test_the_level_of_the_next_step_follows_from_the_counts(
    threshold: float, relative: bool, exchange: str
) -> None:
    """Counts are those of e + g on each rank; with owners, each shard has its own mean square."""
    world = world_of(threshold=threshold, relative=relative, exchange=exchange)
    seen = set()
    for step in range(6):
        before = world.residuals() if exchange != "hierarchical" else []
        given = gradients(step, heavy=0.01 * step)
        world.step(given)
        assert len(set(levels(world))) == 1
        seen.add(levels(world)[0])
        if exchange == "allgather" or (exchange == "sharded" and not relative):
            counts = [
                sum(
                    above(e[n] + np.ravel(g[n]), threshold, relative=relative).size
                    for n in ("w", "v")
                )
                for e, g in zip(before, given, strict=True)
            ]
            assert levels(world)[0] == level_of(counts, 3000 + 1200, 0.08)
    assert seen <= {0.08 / 2**i for i in range(5)}


def test_all_that_is_above_is_sent_and_free_slots_have_the_next_largest() -> None:
    """0.27% of a normal distribution is beyond three standard deviations, 5% of the heavy one."""
    for heavy in (0.0, 0.2):
        world, given = world_of(threshold=3.0), gradients(7, heavy)
        world.step(given)
        for rank in range(RANKS):
            values = np.ravel(given[rank]["w"])
            left = world.residuals()[rank]["w"]
            sent, wanted = np.flatnonzero(left == 0), above(values, 3.0, relative=True)
            assert sent.size == 240  # ceil(0.08 * 3000)
            assert np.abs(values[sent]).min() >= np.abs(left).max()
            assert {*wanted} <= {*sent} if wanted.size <= 240 else {*sent} < {*wanted}


def test_at_its_largest_level_it_is_top_k() -> None:
    top = World(make_plan(SPECS, TopK(0.08, values="int8", min_numel=8)), RANKS, NUMPY)
    mine = world_of(threshold=0.1, values="int8")
    for step in range(3):
        assert same_bits(mine.step(gradients(step)), top.step(gradients(step)))
    assert levels(mine) == [0.08] * RANKS


def test_dense_steps_count_too() -> None:
    world = world_of(threshold=3.0, warmup=((2, 1.0),))
    for step in range(2):
        assert levels(world) == [1.0] * RANKS
        world.step(gradients(step))
        assert not any(each.any() for one in world.residuals() for each in one.values())
    assert levels(world)[0] < 0.04


def test_where_nothing_is_compressed_nothing_is_decided() -> None:
    world = world_of(min_numel=10_000)
    world.step(gradients(0))
    assert levels(world) == [0.08] * RANKS
    assert Filled().decide((0.01,), 0.01, 0.08, {"above": [0.0], "counted": [0.0]}) == (0.01,)


def test_it_has_at_most_eight_levels() -> None:
    world = world_of(warmup=100)
    assert levels(world) == [0.25] * RANKS
    assert world.ranks[0].schedule.levels == (1.0, 0.25, 0.08, 0.04, 0.02, 0.01, 0.005)
