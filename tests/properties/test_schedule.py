"""Law 9: ratios come in finitely many levels; residuals survive each change; dense pays all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle.backends import NUMPY, Backend, each_backend
from oracle.examples import examples
from oracle.jobs import Job, jobs, steps
from oracle.world import Gradients, World, same_bits

from horovod_topk.core.plan.buckets import TensorSpec, make_plan
from horovod_topk.methods.topk import TopK

RUNGS = (0.5, 0.25, 0.05)
DTYPES = ["float32", "float64"]  # whose residuals have their width


def scheduled(job: Job, *stretches: tuple[int, float]) -> Job:
    return replace(job, config=replace(job.config, warmup=stretches))


@each_backend
@examples(15)
@given(data=st.data())
def test_a_step_at_a_level_is_one_of_an_optimizer_at_that_ratio(
    backend: Backend, data: st.DataObject
) -> None:
    """Of the same residuals; for every exchange."""
    job = data.draw(jobs(gather_ratios=[None]))
    stretches = [(2, data.draw(st.sampled_from(RUNGS))), (3, data.draw(st.sampled_from(RUNGS)))]
    warming = World(scheduled(job, *stretches).plan, job.ranks, backend)
    owed: list[dict[str, Any]] | None = None
    ratios = [stretches[0][1]] * 2 + [stretches[1][1]] + [job.config.ratio] * 2
    for ratio, gradients in zip(ratios, data.draw(steps(job, 5)), strict=True):
        single = replace(job, config=replace(job.config, ratio=ratio))
        if ratio == 1.0:
            single = replace(single, config=replace(single.config, values=job.config.values))
        world = World(single.plan, job.ranks, backend)
        for compressor, state in zip(world.ranks, owed or (), strict=False):
            compressor.load_state_dict(state)
        assert same_bits(warming.step(gradients), world.step(gradients))
        assert same_bits(warming.owed(), world.owed())
        owed = [compressor.state_dict() for compressor in world.ranks]


@each_backend
@examples(15)
@given(data=st.data())
def test_dense_pays_all_that_is_owed(backend: Backend, data: st.DataObject) -> None:
    """Whatever the values and the exchange, at full precision."""
    job = data.draw(jobs(dtypes=DTYPES, ratios=[0.05, 0.25]))
    world = World(job.plan, job.ranks, backend)
    first, second, third = data.draw(steps(job, 3))
    world.step(first)
    before = world.owed()
    world.set_ratio(1.0)
    assert same_bits(world.owed(), before)
    exchanged = world.step(second)
    assert not any(e.any() for one in world.owed() for e in one.values())
    assert same_bits(exchanged, [exchanged[0]] * job.ranks)
    world.set_ratio(None)
    untouched = World(job.plan, job.ranks, backend)
    assert same_bits(world.step(third), untouched.step(third))
    assert same_bits(world.owed(), untouched.owed())


SPECS = [TensorSpec("a", (500,), "float32"), TensorSpec("b", (30,), "float64")]


def warming(*stretches: tuple[int, float]) -> World:
    """Two ranks, two buckets."""
    return World(
        make_plan(SPECS, TopK(0.01, min_numel=0, warmup=stretches, values="float32")), 2, NUMPY
    )


def ones(value: float = 1.0) -> list[Gradients]:
    return [{"a": np.full(500, value, np.float32), "b": np.ones(30)} for _ in range(2)]


def names(world: World) -> list[str]:
    return sorted({name for name, _ in world.payloads(0)})


def test_names_are_equal_at_all_levels() -> None:
    """A rank that changes its level alone is found out by its payload; nobody waits for it."""
    world = warming((1, 0.25))
    world.step(ones())
    assert names(world) == ["job.0.0", "job.0.1"]
    world.step(ones())
    assert names(world) == ["job.0.0", "job.0.1"]
    before, after = (len(payload) for name, payload in world.payloads(0) if name == "job.0.0")
    assert before > 8 * after


def test_a_level_does_not_change_within_a_step() -> None:
    world = warming((5, 0.25))
    world.launch(ones())
    world.set_ratio(1.0)
    world.launch(ones())  # again, before it was received
    assert world.ranks[0].plan.config.ratio == 0.25
    world.finish()
    assert world.commit() == [True, True]
    assert world.ranks[0].ratio == 1.0


@pytest.mark.parametrize("ratio", [1, np.float32(1.0), np.float64(0.25), np.int64(1)])
def test_a_ratio_that_is_asked_for_is_saved_as_a_float(ratio: Any) -> None:
    one, other = (warming((5, 0.25)).ranks[0] for _ in range(2))
    one.set_ratio(ratio)
    other.load_state_dict(one.state_dict())
    assert other.ratio == float(ratio) and type(other.counter.asked) is float


def test_a_state_dict_has_the_same_fields_with_and_without_warm_up() -> None:
    assert set(warming((1, 0.5)).ranks[0].state_dict()) == set(
        World(make_plan(SPECS, TopK(ratio=0.01, values="float32")), 2, NUMPY).ranks[0].state_dict()
    )


def test_statistics_are_of_the_present_level() -> None:
    world = warming((1, 0.25))
    world.step(ones())
    assert world.ranks[0].stats().selected == 125 + 8
    world.step(ones())
    assert world.ranks[0].stats().selected == 5 + 1
