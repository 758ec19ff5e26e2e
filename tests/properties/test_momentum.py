"""Momentum correction: what is sparsified is m u + g, and u keeps a share where it was sent."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from oracle.backends import NUMPY, TORCH, Backend, each_backend
from oracle.examples import examples
from oracle.jobs import Job, jobs, steps
from oracle.world import Gradients, World, same_bits

from horovod_topk.core.plan import TensorSpec, make_plan
from horovod_topk.core.rates import Rates
from horovod_topk.errors import (
    ConfigError,
    StateDictError,
    UnsupportedDtypeError,
)
from horovod_topk.methods.topk import TopK

FACTORS = (0.5, 0.9)
SHARES = (0.0, 0.7, 1.0)


@st.composite
def corrected_jobs(draw: st.DrawFn, **choices: Any) -> Job:
    """Jobs with momentum correction."""
    choices = {"exchanges": ("allgather", "sharded"), **choices}
    job = draw(jobs(dtypes=["float32", "float64"], **choices))
    factor = draw(st.sampled_from(FACTORS))
    settings = {
        "momentum": factor,
        "nesterov": draw(st.booleans()),
        "velocity_kept": draw(st.sampled_from(SHARES)),
    }
    return dataclasses.replace(job, config=dataclasses.replace(job.config, **settings))


def kept(velocity: NDArray[Any], share: float) -> NDArray[Any]:
    """u - (1 - s) u, each operation rounded by itself."""
    left: NDArray[Any] = velocity - velocity * velocity.dtype.type(1.0 - share)
    return left


def without(job: Job) -> Job:
    """The same job without it."""
    settings = {"momentum": 0.0, "nesterov": False}
    return dataclasses.replace(job, config=dataclasses.replace(job.config, **settings))


def velocities(world: World) -> list[Gradients]:
    """Flat copies, of every rank."""
    return [world._copies(rank.velocity) for rank in world.ranks if rank.velocity]


def moved(before: NDArray[Any], gradient: NDArray[Any], factor: float) -> NDArray[Any]:
    """m u + g, each operation rounded by itself."""
    kind = gradient.dtype.type
    moved: NDArray[Any] = (before.reshape(gradient.shape) * kind(factor)) + gradient
    return moved


@each_backend
@examples(20)
@given(data=st.data())
def test_it_is_error_feedback_of_velocities(backend: Backend, data: st.DataObject) -> None:
    """Residuals, and what is applied, are to the bit those of a job with m u + g as gradients."""
    job = data.draw(corrected_jobs())
    factor = job.config.momentum
    world, plain = World(job.plan, job.ranks, backend), World(without(job).plan, job.ranks, backend)
    for gradients in data.draw(steps(job, 3)):
        before = velocities(world)
        moves = [
            {name: moved(u[name], g, factor) for name, g in one.items()}
            for u, one in zip(before, gradients, strict=True)
        ]
        if not backend.denormals:
            moves = [{n: np.where(abs(g) < 1e-30, 0, g) for n, g in one.items()} for one in moves]
        sent = moves
        if job.config.nesterov:
            pairs = zip(moves, gradients, strict=True)
            sent = [{n: moved(u[n], g[n], factor) for n in g} for u, g in pairs]
        exchanged, expected = world.step(gradients), plain.step(sent)
        if backend.denormals:
            assert same_bits(exchanged, expected)
            assert same_bits(world.residuals(), plain.residuals())
            assert same_bits(world.owned(), plain.owned())
        for after, one in zip(velocities(world), moves, strict=True):
            for name, move in one.items():
                flat, left = move.reshape(-1), after[name]
                sent = kept(flat, job.config.velocity_kept)
                same = (left == flat) | (left == sent)
                assert same[abs(left) > 1e-30].all()


@each_backend
@examples(20)
@given(data=st.data())
def test_velocity_keeps_a_share_where_it_was_sent_and_is_whole_elsewhere(
    backend: Backend, data: st.DataObject
) -> None:
    job = data.draw(corrected_jobs(exchanges=["allgather"]))
    world = World(job.plan, job.ranks, backend)
    (gradients,) = data.draw(steps(job, 1))
    world.step(gradients)
    for rank, (after, one) in enumerate(zip(velocities(world), gradients, strict=True)):
        chosen = world.decoded(rank).chosen
        whole = {t.spec.name for t in job.plan.tensors() if t.index is None}
        for name, g in one.items():
            left = g.reshape(-1).copy()
            if name not in whole:
                left[chosen[name]] = kept(left[chosen[name]], job.config.velocity_kept)
            tiny = abs(left) < np.finfo(left.dtype).tiny
            assert np.array_equal(after[name][~tiny], left[~tiny])
            assert (after[name][tiny] == left[tiny]).all() or not backend.denormals


@each_backend
@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_by_default_velocities_lose_most_where_little_had_waited(
    backend: Backend, exchange: str, nesterov: bool
) -> None:
    """d = 1/2 min(1, |u| / |a|) (lr / largest lr)^2, of elements that were sent."""
    config = TopK(
        0.1,
        momentum=0.9,
        nesterov=nesterov,
        velocity_kept="auto",
        min_numel=0,
        exchange=exchange,
        values="float32",
    )
    size, rate, random = 1100, [0.0], np.random.default_rng(5)
    world = World(make_plan([TensorSpec("w", (size,), "float32")], config), 2, backend)
    for each in world.ranks:
        each.rates = Rates(lambda: {"w": rate[0]})
    lost = 0
    for step, rate[0] in enumerate((0.1, 0.4, 0.4, 0.39)):
        gradients = [{"w": random.standard_normal(size).astype("f")} for _ in range(2)]
        factor = np.float32((0.1, 0.4, 0.4, 0.39)[max(step - 1, 0)] / rate[0])
        before, waited = velocities(world), world.residuals()
        world.step(gradients)
        for rank, after in enumerate(velocities(world)):
            g = gradients[rank]["w"]
            u = moved(before[rank]["w"], g, 0.9)
            a = waited[rank]["w"].reshape(-1) * factor + (moved(u, g, 0.9) if nesterov else u)
            d = 0.5 * np.minimum(1, abs(u / a)) * (rate[0] / (0.1, 0.4, 0.4, 0.4)[step]) ** 2
            is_sent = after["w"] != u
            np.testing.assert_allclose(after["w"][is_sent], ((1 - d) * u)[is_sent], 1e-5)
            assert is_sent.sum() <= size / 10 + 2  # a shard rounds up
            lost += is_sent.sum()
    assert lost > 0.9 * 4 * 2 * size / 10


@each_backend
@examples(10)
@given(data=st.data())
def test_a_step_that_does_not_count_leaves_velocities_as_they_were(
    backend: Backend, data: st.DataObject
) -> None:
    job = data.draw(corrected_jobs())
    world = World(job.plan, job.ranks, backend)
    first, second = data.draw(steps(job, 2))
    world.step(first)
    before = velocities(world)
    world.exchange(second)
    world.rollback()
    assert same_bits(velocities(world), before)
    spoiled = [{name: g * np.nan for name, g in one.items()} for one in second]
    world.exchange(spoiled)
    world.commit()
    assert same_bits(velocities(world), before)


@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
def test_at_ratio_one_it_is_heavy_ball_momentum(exchange: str) -> None:
    config = TopK(1.0, momentum=0.5, exchange=exchange)
    world = World(make_plan([TensorSpec("w", (40,), "float32")], config), 2, NUMPY)
    gradients = [{"w": np.full(40, rank + 1.0, np.float32)} for rank in range(2)]
    applied = [world.step(gradients)[0]["w"] for _ in range(3)]
    for got, expected in zip(applied, (1.5, 2.25, 2.625), strict=True):
        np.testing.assert_array_equal(got, np.full(40, expected, np.float32))


def one_rank(momentum: float = 0.9) -> World:
    config = TopK(0.1, momentum=momentum, min_numel=0)
    return World(make_plan([TensorSpec("w", (40,), "float32")], config), 1, TORCH)


def step_of(world: World) -> None:
    world.step([{"w": np.arange(40, dtype=np.float32)}])


def test_velocities_are_saved_and_loaded() -> None:
    one, other = one_rank(), one_rank()
    step_of(one)
    other.ranks[0].load_state_dict(one.ranks[0].state_dict())
    assert same_bits(velocities(one), velocities(other))
    assert velocities(one)[0]["w"].any()
    step_of(one)
    step_of(other)
    assert same_bits(velocities(one), velocities(other))
    one.ranks[0].reset()
    assert not velocities(one)[0]["w"].any()


def test_velocities_stay_from_level_to_level() -> None:
    config = TopK(0.1, momentum=0.9, velocity_kept=0, min_numel=0, warmup=((1, 0.25),))
    world = World(make_plan([TensorSpec("w", (40,), "float32")], config), 1, TORCH)
    step_of(world)
    before = velocities(world)
    world.exchange([{"w": np.ones(40, np.float32)}])
    assert world.ranks[0].state_dict()["velocity"]["ratio"] == 0.1
    world.rollback()
    assert same_bits(velocities(world), before)
    assert np.count_nonzero(before[0]["w"]) == 29  # of 0 to 39; the 10 largest were sent


@pytest.mark.parametrize(("saved", "loaded"), [(0.9, 0.0), (0.0, 0.9)])
def test_a_state_of_another_kind_is_refused(saved: float, loaded: float) -> None:
    one, other = one_rank(saved), one_rank(loaded)
    step_of(one)
    step_of(other)
    before = other.residuals()
    with pytest.raises(StateDictError, match="velocities of momentum correction"):
        other.ranks[0].load_state_dict(one.ranks[0].state_dict())
    assert same_bits(other.residuals(), before)


def test_what_cannot_be_corrected_is_refused() -> None:
    specs = [TensorSpec("half", (40,), "float16")]
    with pytest.raises(UnsupportedDtypeError, match="half"):
        World(make_plan(specs, TopK(momentum=0.9)), 1, NUMPY)
    for momentum in (-0.1, 1.0, True, "0.9", float("nan")):
        with pytest.raises(ConfigError, match="momentum="):
            TopK(momentum=momentum)  # type: ignore[arg-type]
    for nesterov, momentum in ((True, 0.0), (1, 0.9)):
        with pytest.raises(ConfigError, match="nesterov="):
            TopK(momentum=momentum, nesterov=nesterov)  # type: ignore[arg-type]
    for share in (-0.1, 1.1, True, "0.9", float("nan")):
        with pytest.raises(ConfigError, match="velocity_kept="):
            TopK(momentum=0.9, velocity_kept=share)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="added up within"):
        TopK(momentum=0.9, exchange="hierarchical")
