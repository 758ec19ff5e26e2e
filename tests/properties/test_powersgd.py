"""Test PowerSGD against a full SVD and torch's hook, and test its state."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from oracle.backends import NUMPY, TORCH, Backend
from oracle.world import World
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from horovod_topk.core.plan.buckets import TensorSpec, make_plan
from horovod_topk.errors import StateDictError
from horovod_topk.methods import PowerSGD, SignSGD

M, N = 48, 36
Array = NDArray[Any]


def world_of(ranks: int = 1, backend: Backend = NUMPY, **settings: Any) -> World:
    specs = [TensorSpec("w", (M, N), "float32"), TensorSpec("b", (N,), "float32")]
    return World(make_plan(specs, PowerSGD(min_numel=0, **settings)), ranks, backend)


def matrix(seed: int = 0, decay: float = 0.6) -> Array:
    """Return an [M, N] matrix whose i-th singular value is decay^i."""
    random = np.random.default_rng(seed)
    left, _ = np.linalg.qr(random.standard_normal((M, N)))
    right, _ = np.linalg.qr(random.standard_normal((N, N)))
    return (left * decay ** np.arange(N) @ right).astype(np.float32)


def step(world: World, *matrices: Array) -> Array:
    """Run a step, and return the gradient that it applies."""
    bias = np.ones(N, np.float32)
    return world.step([{"w": each, "b": bias} for each in matrices])[0]["w"]


def factor(world: World) -> Array:
    """Return the Q^T that the next step begins with, [r, n]."""
    state: Any = world.ranks[0].state_dict()
    return np.asarray(state["state.q"]["residuals"]["w"]).reshape(-1, N)


def clear(world: World) -> None:
    """Set the residuals to zero, and keep Q."""
    for rank in world.ranks:
        state: Any = rank.state_dict()
        for residual in state["residuals"].values():
            residual *= 0
        rank.load_state_dict(state)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_of_the_same_matrix_it_finds_the_best_approximation(rank: int) -> None:
    """Within a few steps the error is that of the truncated SVD."""
    world, g = world_of(rank=rank), matrix()
    best = np.sqrt(np.square(np.linalg.svd(g, compute_uv=False)[rank:]).sum())
    errors = []
    for _ in range(12):
        errors.append(np.linalg.norm(step(world, g) - g))
        clear(world)
    assert errors[0] > 1.01 * best
    assert errors[-1] == pytest.approx(best, rel=1e-3)


def test_a_matrix_of_low_rank_is_exact_at_once() -> None:
    """Columns that depend on others are left out, and drawn anew in the next step."""
    random = np.random.default_rng(1)
    g = (random.standard_normal((M, 2)) @ random.standard_normal((2, N))).astype(np.float32)
    world = world_of(rank=4)
    for _ in range(3):
        np.testing.assert_allclose(step(world, g), g, atol=2e-5)
    assert np.abs(world.residuals()[0]["w"]).max() < 1e-4


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_gradients_of_any_size_are_found(scale: float) -> None:
    world, g = world_of(rank=2), matrix()
    large = np.linalg.norm(step(world, (g * np.float32(scale))) / scale - g)
    assert large == pytest.approx(np.linalg.norm(step(world_of(rank=2), g) - g), rel=1e-3)


def test_zeros_are_survived() -> None:
    world, zeros = world_of(rank=2), np.zeros((M, N), np.float32)
    assert not step(world, zeros).any()
    assert not factor(world).any()
    assert step(world, matrix()).any()


@pytest.mark.parametrize("ranks", [2, 3])
def test_it_approximates_the_mean_and_keeps_each_ranks_own_rest(ranks: int) -> None:
    world = world_of(ranks, rank=2)
    matrices = [matrix(seed) for seed in range(ranks)]
    applied = step(world, *matrices)
    mean = np.mean(matrices, axis=0)
    left = [one["w"].reshape(M, N) for one in world.residuals()]
    np.testing.assert_allclose(applied + np.mean(left, axis=0), mean, atol=1e-6)
    basis, _, _ = np.linalg.svd(applied)  # P is a basis of what is applied
    for own, rest in zip(matrices, left, strict=True):
        span = basis[:, :2] @ basis[:, :2].T
        np.testing.assert_allclose(rest, own - span @ own, atol=1e-5)


def test_it_is_torchs_hook_from_the_same_q() -> None:
    """Compare with one step of torch.distributed's PowerSGD on one rank."""
    world, g = world_of(backend=TORCH, rank=4), matrix(2)
    step(world, g)
    clear(world)
    q = factor(world).T.copy()
    applied = step(world, g)
    p = torch.from_numpy(g @ q)
    powerSGD_hook._orthogonalize(p[None])
    expected = p @ (torch.from_numpy(g).T @ p).T
    error = np.linalg.norm(applied - expected.numpy()) / np.linalg.norm(expected.numpy())
    assert error < 1e-5


def test_small_and_flat_tensors_are_sent_whole() -> None:
    shapes = {"thin": (100, 4), "flat": (4096,), "conv": (64, 16, 3, 3), "number": ()}
    specs = [TensorSpec(name, shape, "float32") for name, shape in shapes.items()]
    plan = make_plan(specs, PowerSGD(rank=4, min_numel=0))
    assert set(plan.sent_dense()) == {"thin", "flat", "number"}
    assert plan.config.state(SimpleNamespace(spec=specs[2], numel=9216))["q"].numel == 576


def test_dense_is_a_level_and_q_survives_it() -> None:
    world, g = world_of(2, rank=2, warmup=((1, 1.0),)), matrix()
    assert np.array_equal(step(world, g, g), g)
    first = step(world, g, g)
    assert not np.allclose(first, g, atol=1e-3)
    world.set_ratio(1.0)
    q = factor(world)
    step(world, g, g)
    assert not world.residuals()[0]["w"].any()
    assert np.array_equal(factor(world), q)


def test_a_spike_of_one_step_does_not_stop_later_steps() -> None:
    world = world_of(2, rank=2)
    for seed in range(6):
        mine = matrix(seed)
        if seed == 2:
            mine[[3, 7, 20, 11], [4, 9, 30, 2]] = 1e25
        assert np.isfinite(step(world, mine, matrix(seed + 50))).all(), seed


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (None, "the state dict has nothing for the method's q: another compressor saved it"),
        (3, "the method's q: the state dict's shape is"),
    ],
)
def test_a_state_of_another_method_or_rank_is_refused(other: int | None, said: str) -> None:
    here = world_of(rank=2)
    step(here, matrix())
    before = here.residuals()[0]["w"].copy()
    specs = [TensorSpec("w", (M, N), "float32"), TensorSpec("b", (N,), "float32")]
    signs = World(make_plan(specs, SignSGD(min_numel=0)), 1, NUMPY)
    saved = signs if other is None else world_of(rank=other)
    with pytest.raises(StateDictError, match=re.escape(said)):
        here.ranks[0].load_state_dict(saved.ranks[0].state_dict())
    assert np.array_equal(here.residuals()[0]["w"], before)
