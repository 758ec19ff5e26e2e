"""Law 1: what is sent and what is kept add up to what was there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from oracle.backends import TORCH, Backend, each_backend
from oracle.examples import examples
from oracle.jobs import gradient, jobs, steps
from oracle.world import World

from horovod_topk.core.plan import TensorSpec, make_plan
from horovod_topk.methods.topk import VALUES, TopK

ALONE, GATHERED = st.just(1), ["allgather"]


def assert_conserved(world: World, before: dict[str, Any], gradients: dict[str, Any]) -> None:
    """decode(p) + e_new == e_old + g, the sign of zero aside.

    Signs of very unequal values share a scale that is no part of either: the sum is rounded then.
    """
    after, sent = world.residuals()[0], world.decoded(0).dense
    exact = world.plan.config.values != "sign"
    for name, old in before.items():
        owed = old + gradients[name].reshape(-1).astype(old.dtype)
        decoded = sent[name].astype(old.dtype)
        assert np.array_equal(after[name], owed - decoded), name
        if exact:
            assert np.array_equal(decoded + after[name], owed), name
        else:
            error = np.abs(decoded + after[name] - owed)
            assert (error <= np.spacing(np.maximum(np.abs(decoded), np.abs(owed)))).all(), name


@each_backend
@examples(20)
@given(data=st.data())
def test_nothing_is_lost_or_invented(backend: Backend, data: st.DataObject) -> None:
    job = data.draw(jobs(ranks=ALONE, exchanges=GATHERED))
    world = World(job.plan, 1, backend)
    for gradients in data.draw(steps(job, 3)):
        before = world.residuals()[0]
        world.step(gradients)
        assert_conserved(world, before, gradients[0])


@each_backend
@given(data=st.data())
def test_with_full_width_values_what_is_sent_owes_nothing(
    backend: Backend, data: st.DataObject
) -> None:
    job = data.draw(jobs(ranks=ALONE, values=["float32"], exchanges=GATHERED))
    world = World(job.plan, 1, backend)
    world.step(data.draw(steps(job, 1, huge=True))[0])
    residual, chosen = world.residuals()[0], world.decoded(0).chosen
    assert all(not residual[name][index].any() for name, index in chosen.items())


@pytest.mark.parametrize("values", VALUES)
def test_bfloat16_gradients_have_float32_residuals(values: str) -> None:
    """NumPy has no bfloat16; multiples of 1/8 below 16 are exact in it."""
    plan = make_plan([TensorSpec("w", (40,), "bfloat16")], TopK(0.1, values=values, min_numel=0))
    world = World(plan, 1, TORCH)
    random = np.random.default_rng(0)
    for _ in range(4):
        g = (random.integers(-127, 128, 40) / 8).astype(np.float32)
        before = world.residuals()[0]
        assert before["w"].dtype == np.float32
        world.step([{"w": g}])
        assert_conserved(world, before, {"w": g})
    assert world.residuals()[0]["w"].any()


@each_backend
def test_saturated_values_stay_in_the_residual(backend: Backend) -> None:
    """65504 is the largest float16; a float32 of 1e30 leaves all but that behind."""
    plan = make_plan([TensorSpec("w", (3,), "float32")], TopK(values="float16"))
    world = World(plan, 1, backend)
    owed = np.array([1e30, -70000.0, 65504.0], np.float32)
    world.step([{"w": owed}])
    sent = np.array([65504.0, -65504.0, 65504.0], np.float32)
    assert world.decoded(0).dense["w"].tolist() == sent.tolist()
    assert world.residuals()[0]["w"].tolist() == (owed - sent).tolist()


@each_backend
@pytest.mark.parametrize("numel", [2**16 - 1, 2**16, 2**16 + 1])
@pytest.mark.parametrize("indices", ["packed", "plain"])
@pytest.mark.parametrize("values", VALUES)
def test_where_indices_outgrow_sixteen_bits(
    backend: Backend, numel: int, values: str, indices: str
) -> None:
    settings = TopK(values=values, indices=indices)
    plan = make_plan([TensorSpec("w", (numel,), "float32")], settings)
    world = World(plan, 1, backend)
    random = np.random.default_rng(numel)
    for texture in ("normal", "ties"):
        g = gradient(random, texture, plan.buckets[0].tensors[0].spec)
        g[[0, -1]] = 50.0, -60.0
        before = world.residuals()[0]
        world.step([{"w": g}])
        assert_conserved(world, before, {"w": g})
        assert {0, numel - 1} <= set(world.decoded(0).chosen["w"].tolist())


@each_backend
@given(data=st.data())
def test_the_largest_magnitudes_are_sent_and_ties_go_to_the_lower_index(
    backend: Backend, data: st.DataObject
) -> None:
    job = data.draw(jobs(ranks=ALONE, values=["float32"], exchanges=GATHERED))
    world = World(job.plan, 1, backend)
    for gradients in data.draw(steps(job, 2)):
        owed = _owed(world, gradients[0])
        world.step(gradients)
        for tensor in job.plan.tensors():
            magnitude = np.abs(owed[tensor.spec.name])
            best = np.lexsort((np.arange(magnitude.size), -magnitude))[: tensor.k]
            chosen = world.decoded(0).chosen[tensor.spec.name]
            assert chosen.tolist() == sorted(best.tolist())


def _owed(world: World, gradients: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    residual = world.residuals()[0]
    return {n: e + gradients[n].reshape(-1).astype(e.dtype) for n, e in residual.items()}
