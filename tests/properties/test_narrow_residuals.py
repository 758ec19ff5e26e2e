"""Residuals in fewer bits: a step rounds the new residual once, and nothing else is lost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from oracle.backends import NATIVE, NUMPY, Backend, each_backend
from oracle.world import Gradients, World, same_bits

from horovod_topk.core.plan.buckets import TensorSpec, make_plan
from horovod_topk.core.state.reshard import pending
from horovod_topk.core.state.residual import STORED
from horovod_topk.methods.onebit import OneBit
from horovod_topk.methods.powersgd import PowerSGD
from horovod_topk.methods.terngrad import TernGrad
from horovod_topk.methods.topk import TopK
from horovod_topk.ops.coding import value_bytes

NARROW = ("bfloat16", "int8", "int4")
BLOCK = 128
HALF_STEPS = {"int8": 1 / 254, "int4": 1 / 14}  # of a block's largest stored element
SPECS = [
    TensorSpec("w", (70, 41), "float32"),
    TensorSpec("v", (7,), "float16"),
    TensorSpec("u", (1300,), "float32"),
    TensorSpec("d", (259,), "float64"),  # in a bucket of its own
]
METHODS = {
    "allgather": TopK(0.05, min_numel=8),
    "sharded": TopK(0.05, min_numel=8, exchange="sharded", gather_ratio=0.1),
    "hierarchical": TopK(0.05, min_numel=8, exchange="hierarchical"),
    "announcing": OneBit(min_numel=8),
    "rounds": PowerSGD(min_numel=8),
}
each_format = pytest.mark.parametrize("residuals", NARROW)


def gradients(ranks: int, seed: int) -> list[Gradients]:
    """Elements of very different sizes, in each tensor."""
    random = np.random.default_rng(seed)
    return [
        {s.name: (random.standard_normal(s.shape) ** 3).astype(s.dtype) for s in SPECS}
        for _ in range(ranks)
    ]


def world_of(method: Any, residuals: str, ranks: int, backend: Backend) -> World:
    return World(make_plan(SPECS, replace(method, residuals=residuals)), ranks, backend)


def rounded(values: NDArray[Any], residuals: str) -> NDArray[Any]:
    """Values as they are stored, by the reference."""
    ops, kind = NUMPY.ops, STORED[residuals]
    rows = ops.pack_values(values, kind)[None]
    return ops.unpack_values(rows, values.size, kind, values.dtype.name)[0]


def bound(stored: NDArray[Any], residuals: str) -> NDArray[Any]:
    """The largest rounding error of each stored element."""
    magnitude = np.abs(stored.astype("f8"))
    if residuals == "bfloat16":
        return magnitude / 256
    blocks = np.pad(magnitude, (0, -magnitude.size % BLOCK)).reshape(-1, BLOCK).max(1)
    return np.repeat(blocks, BLOCK)[: magnitude.size] * HALF_STEPS[residuals] * (1 + 1e-6)


@each_backend
@each_format
def test_the_new_residual_is_rounded_once(backend: Backend, residuals: str) -> None:
    """It is what the format makes of e + g - decode(p), to the bit, and within the bound."""
    world = world_of(METHODS["allgather"], residuals, 1, backend)
    for seed in range(4):
        (before,), (g,) = world.residuals(), gradients(1, seed)
        world.step([g])
        (after,), sent = world.residuals(), world.decoded(0).dense
        for name, e in before.items():
            left = e + g[name].reshape(-1).astype(e.dtype) - sent[name].astype(e.dtype)
            assert np.array_equal(after[name], rounded(left, residuals)), name
            error = np.abs(after[name].astype("f8") - left)
            assert (error <= bound(after[name], residuals)).all(), name
    assert any(after["w"])


@each_format
@pytest.mark.parametrize("name", METHODS)
def test_nothing_but_rounding_errors_is_lost(name: str, residuals: str) -> None:
    """Gradients, less what was applied, are in the residuals of ranks and owners."""
    size = 3
    world = world_of(METHODS[name], residuals, size, NATIVE)
    lost = {spec.name: np.zeros(spec.numel) for spec in SPECS}
    largest = {spec.name: np.zeros(spec.numel) for spec in SPECS}
    for seed in range(4):
        own = gradients(size, seed)
        applied = world.step(own)[0]
        for spec in SPECS:
            mean = np.mean([g[spec.name].astype("f8").ravel() for g in own], 0)
            lost[spec.name] += mean - applied[spec.name].astype("f8").ravel()
            for rank in world.ranks:
                state = rank.state_dict()
                share = 1 / size
                for part in (state, state.get("owned", {})):
                    e = part.get("residuals", {}).get(spec.name)
                    if e is not None:
                        most = bound(NATIVE.numpy(e), residuals).max(initial=0.0)
                        largest[spec.name] += share * most
                    share = 1.0  # owners' are in units of the mean
        states = (rank.state_dict() for rank in world.ranks)
        waiting = pending(states, size, "average", NATIVE.ops)
        for spec in SPECS:
            error = np.abs(lost[spec.name] - NATIVE.numpy(waiting[spec.name]))
            slack = 1e-4 if spec.dtype != "float16" else 0.01  # applied gradients are float16
            assert (error <= largest[spec.name] + slack).all(), spec.name


@each_format
def test_residuals_of_another_format_are_rounded_once(residuals: str) -> None:
    wide = world_of(METHODS["allgather"], "float32", 1, NATIVE)
    world = world_of(METHODS["allgather"], residuals, 1, NATIVE)
    wide.step(gradients(1, 0))
    world.ranks[0].load_state_dict(wide.ranks[0].state_dict())
    (given,), (stored,) = wide.residuals(), world.residuals()
    for name, e in given.items():
        assert np.array_equal(stored[name], rounded(e, residuals)), name
    wide.ranks[0].load_state_dict(world.ranks[0].state_dict())
    assert same_bits(wide.residuals(), [stored])


@each_backend
@each_format
def test_rescaling_rounds_nothing_until_a_step_commits(backend: Backend, residuals: str) -> None:
    """Factors that come one after another, before steps that are rolled back, are multiplied."""
    world = world_of(METHODS["allgather"], residuals, 1, backend)
    world.step(gradients(1, 0))
    (before,) = world.residuals()
    for factor in (0.75, 3.0):
        world.ranks[0].registry.rescale({"w": factor})
        world.exchange(gradients(1, 1))
        world.rollback()
    (after,) = world.residuals()
    assert np.array_equal(after["w"], before["w"] * np.float32(0.75 * 3.0))
    assert same_bits([{**after, "w": before["w"]}], [before])
    (g,) = gradients(1, 2)
    world.exchange([g])
    (rank,) = world.ranks
    rank.commit(without=["w"])  # its gradient was not used
    (kept,) = world.residuals()
    assert np.array_equal(kept["w"], after["w"])
    assert not np.array_equal(kept["u"], after["u"])


@each_format
def test_memory_is_that_of_the_format(residuals: str) -> None:
    (rank,) = world_of(METHODS["allgather"], residuals, 1, NATIVE).ranks
    stored = sum(value_bytes(residuals, spec.numel) for spec in SPECS)
    assert rank.memory_bytes == 2 * stored + rank.exchange.buffer_bytes(rank.plan)
    elements = sum(spec.numel for spec in SPECS)
    assert rank.stats().elements == elements
    assert rank.stats().element_bytes == {"residuals": 2 * stored / elements}


def test_methods_without_error_feedback_keep_zeros() -> None:
    world = world_of(TernGrad(min_numel=8), "int4", 2, NATIVE)
    world.step(gradients(2, 0))
    assert not any(e.any() for each in world.residuals() for e in each.values())
