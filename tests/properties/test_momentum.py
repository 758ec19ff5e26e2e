"""Momentum correction: what is sparsified is m u + g, and u is 0 where it was sent."""

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

from horovod_topk.core.plan.buckets import TensorSpec, make_plan
from horovod_topk.errors import ConfigError, StateDictError, UnsupportedDtypeError
from horovod_topk.methods.topk import TopK

DAMPING = (0.5, 0.9)


@st.composite
def corrected_jobs(draw: st.DrawFn, **choices: Any) -> Job:
    """Jobs with momentum correction."""
    choices = {"exchanges": ("allgather", "sharded"), **choices}
    job = draw(jobs(dtypes=["float32", "float64"], **choices))
    factor = draw(st.sampled_from(DAMPING))
    settings = {"momentum": factor, "nesterov": draw(st.booleans())}
    return dataclasses.replace(job, config=dataclasses.replace(job.config, **settings))


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
            assert same_bits(world.owed(), plain.owed())
        for after, one in zip(velocities(world), moves, strict=True):
            for name, move in one.items():
                flat, left = move.reshape(-1), after[name]
                assert ((left == flat) | (left == 0))[abs(left) > 1e-30].all()


@each_backend
@examples(20)
@given(data=st.data())
def test_velocity_is_zero_where_it_was_sent_and_whole_elsewhere(
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
                left[chosen[name]] = 0.0
            tiny = abs(left) < np.finfo(left.dtype).tiny
            assert np.array_equal(after[name][~tiny], left[~tiny])
            assert (after[name][tiny] == left[tiny]).all() or not backend.denormals


def one_rank(momentum: float = 0.9) -> World:
    config = TopK(0.1, momentum=momentum, min_numel=0)
    return World(make_plan([TensorSpec("w", (40,), "float32")], config), 1, TORCH)


def step_of(world: World) -> None:
    world.step([{"w": np.arange(40, dtype=np.float32)}])


def test_a_reset_forgets_velocities() -> None:
    one = one_rank()
    step_of(one)
    assert velocities(one)[0]["w"].any()
    one.ranks[0].reset()
    assert not velocities(one)[0]["w"].any()


def test_velocities_stay_from_level_to_level() -> None:
    config = TopK(0.1, momentum=0.9, min_numel=0, warmup=((1, 0.25),))
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
        other.ranks[0].load_state_dict(one.ranks[0].state_dict() | {"guard": "of an older version"})
    assert same_bits(other.residuals(), before)


def test_what_cannot_be_corrected_is_refused() -> None:
    specs = [TensorSpec("half", (40,), "float16")]
    with pytest.raises(UnsupportedDtypeError, match="half"):
        World(make_plan(specs, TopK(momentum=0.9)), 1, NUMPY)
    for momentum in (-0.1, 1.0, True, "0.9", float("nan"), "optimizer"):
        with pytest.raises(ConfigError, match=r"momentum=.*'auto', the default"):
            TopK(momentum=momentum)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Nesterov's form of no momentum"):
        TopK(momentum=0.0, nesterov=True)
    with pytest.raises(ConfigError, match="added up within"):
        TopK(momentum=0.9, exchange="hierarchical")
