"""Random numbers of methods: which ones a step draws, and that readers draw the writers' again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from oracle.backends import NATIVE, NUMPY, TENSORFLOW, TORCH, Backend, each_of
from oracle.dithered import Dithered, DitheredSum
from oracle.world import Gradients, World, drawn, same_bits

from horovod_topk.core.plan.buckets import TensorSpec, make_plan
from horovod_topk.methods import Method
from horovod_topk.methods.keys import Key

RANKS = 3
SHAPES = {"w": (40, 30), "v": (7, 9), "b": (5,)}  # w has blocks of several owners; b is whole
SPECS = [TensorSpec(name, shape, "float32") for name, shape in SHAPES.items()]
METHODS = {
    **{each: Dithered(exchange=each, min_numel=8) for each in ("allgather", "sharded")},
    "hierarchical": Dithered(exchange="hierarchical", min_numel=8),
    "reduce": DitheredSum(min_numel=8),
}
each_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
each_backend = each_of(NUMPY, NATIVE, rest=[TORCH, TENSORFLOW])


def world_of(method: Method, backend: Backend = NUMPY) -> World:
    return World(make_plan(SPECS, method), RANKS, backend)


def gradients(step: int) -> list[Gradients]:
    return drawn(SPECS, RANKS, step)


def latest(world: World) -> list[dict[str, bytes]]:
    """What each rank has sent last, by name."""
    return [dict(world.payloads(rank)) for rank in range(RANKS)]


# A key.


def key(**changed: Any) -> Key:
    usual = {"seed": 0, "identity": ("w", "direct", 0), "committed": 5, "rank": 1}
    known = usual | changed
    rank = known.pop("rank")
    return Key(**known, rank=lambda: rank)


def test_own_numbers_differ_from_the_peers_and_shared_ones_do_not() -> None:
    ranks = [key(rank=rank) for rank in range(RANKS)]
    assert len({each.own.key for each in ranks}) == RANKS
    assert len({each.shared.key for each in ranks}) == 1
    assert ranks[0].shared.key not in {each.own.key for each in ranks}


@pytest.mark.parametrize(
    "changed",
    [{"seed": 1}, {"committed": 6}]
    + [{"identity": each} for each in (("v", "direct", 0), ("w", "gather", 0), ("w", "direct", 1))],
    ids=str,
)
def test_numbers_follow_from_all_of_a_key(changed: dict[str, Any]) -> None:
    def draw(stream: Any) -> list[int]:
        found: list[int] = NUMPY.ops.random_bits(stream, 8, 32).tolist()
        return found

    for stream in ("own", "shared"):
        usual, other = (draw(getattr(each, stream)) for each in (key(), key(**changed)))
        assert usual == draw(getattr(key(), stream))
        assert not set(usual) & set(other)


# A step.


@pytest.mark.one_in(5)
@each_method
@each_backend
def test_readers_draw_what_the_writers_drew(backend: Backend, method: Method) -> None:
    """With other numbers than the writer's, values would be tens from what was sent."""
    world, oracle = world_of(method, backend), world_of(method)
    applied, given = ({n: np.zeros(s) for n, s in SHAPES.items()} for _ in range(2))
    for step in range(3):
        mine, exchanged = gradients(step), world.step(gradients(step))
        assert same_bits(exchanged, [exchanged[0]] * RANKS)
        assert same_bits(exchanged, oracle.step(gradients(step)))
        for name in SHAPES:
            applied[name] += exchanged[0][name]
            given[name] += np.mean([one[name] for one in mine], 0)
    for name in SHAPES:  # what the last step left behind is rounding, of numbers up to 128
        np.testing.assert_allclose(applied[name], given[name], atol=0.3)


@each_method
def test_another_seed_draws_other_numbers(method: Method) -> None:
    seeds = [world_of(replace(method, seed=seed)) for seed in (0, 1)]  # type: ignore[call-arg]
    for world in seeds:
        world.step(gradients(0))
    assert latest(seeds[0]) != latest(seeds[1])


def test_the_norm_of_gradients_is_read_with_the_numbers_of_their_step() -> None:
    world = world_of(METHODS["allgather"])
    for commits in (True, False):
        mine = gradients(3)
        world.exchange(mine)
        world.commit() if commits else world.rollback()
        for rank, compressor in enumerate(world.ranks):
            expected = np.sqrt(sum(np.sum(g.astype("f8") ** 2) for g in mine[rank].values()))
            assert compressor.squares().gradient ** 0.5 == pytest.approx(expected, rel=1e-3)
