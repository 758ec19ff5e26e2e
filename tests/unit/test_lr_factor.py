"""The factor that lowers Adam's learning rate, by its formula, and what it is made of."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from oracle.backends import NATIVE, NUMPY, TENSORFLOW, TORCH, Backend
from oracle.world import SPECS, World, gradients
from torch import nn

from horovod_topk.core.guard import Watch
from horovod_topk.core.lr_factor import (
    EXCHANGED,
    GAIN,
    MARGIN,
    LearningRateFactor,
    compare,
)
from horovod_topk.core.momentum_takeover import check_lowers
from horovod_topk.core.plan import TensorSpec, make_plan
from horovod_topk.core.residual import Arenas
from horovod_topk.core.rounds import state_plan
from horovod_topk.errors import ConfigError, StateDictError
from horovod_topk.methods.topk import TopK
from horovod_topk.torch_training.momentum import Loan

Array = np.ndarray
LOWERS = TopK(ratio=0.1, min_numel=0, momentum=0.6, lower_lr=True)


def by_formula(cosines: list[float]) -> float:
    mean = 0.0
    for count, cosine in enumerate(cosines, 1):
        mean += (max(-0.2, min(0.2, cosine)) - mean) / min(count, 20)
    return 1 / (1 + GAIN * max(0.0, -mean - MARGIN))


def squares(*arrays: Array) -> list[float]:
    return [float(np.square(each).sum()) for each in arrays]


def test_the_factor_follows_cosines_of_neighbours() -> None:
    random = np.random.default_rng(0)
    gradients = random.standard_normal((60, 40)) + np.outer((-0.4) ** np.arange(60), np.ones(40))
    factor, cosines = LearningRateFactor(), list[float]()
    for before, now in pairwise(gradients):
        factor.observe(*squares(before, now, before + now))
        cosines.append(float(before @ now / np.linalg.norm(before) / np.linalg.norm(now)))
        factor.agree([factor.mean])
        assert factor.value == pytest.approx(by_formula(cosines))
    assert factor.seen == 59


def test_the_mean_over_ranks_counts() -> None:
    factor = LearningRateFactor()
    factor.agree([-0.1, 0.0, 0.01])
    assert factor.value == pytest.approx(1 / (1 + GAIN * (0.03 - MARGIN)))
    factor.agree([])
    assert factor.value == 1.0


def test_gradients_that_agree_leave_the_learning_rate_alone() -> None:
    factor = LearningRateFactor()
    for _ in range(5):
        factor.observe(5.0, 5.0, 20.0)
    factor.agree([factor.mean])
    assert (factor.value, factor.mean) == (1.0, pytest.approx(0.2))


@pytest.mark.parametrize("square", [0.0, math.inf, math.nan])
def test_where_there_is_no_angle_nothing_changes(square: float) -> None:
    factor = LearningRateFactor()
    factor.observe(1.0, 1.0, 0.0)
    factor.observe(square, 1.0, square)
    factor.observe(1.0, square, square)
    assert factor.saved() == [1.0, -0.2]


def test_it_goes_on_from_what_was_saved() -> None:
    one, other = LearningRateFactor(), LearningRateFactor()
    assert one.saved() == []
    one.observe(2.0, 3.0, 1.0)
    other.load(one.saved())
    for each in (one, other):
        each.observe(3.0, 1.0, 4.5)
    assert one.saved() == other.saved()
    one.load([])
    assert one.saved() == []


def kept_and_compared(before: Array, now: Array, backend: Backend) -> tuple[list[float], Array]:
    """The sums of two steps, and the sample of the second."""
    (bucket,) = make_plan([TensorSpec("a", before.shape, "float32")], LOWERS).buckets
    plan, ops = state_plan(bucket, EXCHANGED), backend.ops
    arenas = Arenas(plan, *(ops.zeros(plan.numel, "float32", "cpu") for _ in range(2)))
    for each in (before, now):
        gradient = backend.array(each.reshape(-1), "float32")
        sums = backend.numpy(compare(bucket, arenas, [gradient], ops))
        arenas.swap()
    assert sums.dtype == np.float32
    return sums.tolist(), backend.numpy(arenas.residual)


@pytest.mark.parametrize("backend", [NUMPY, TORCH, NATIVE, TENSORFLOW], ids=lambda each: each.name)
def test_a_tensor_of_usual_size_is_compared_whole(backend: Backend) -> None:
    random = np.random.default_rng(0)
    before, now = random.standard_normal((2, 300, 90)).astype(np.float32)
    sums, sample = kept_and_compared(before, now, backend)
    assert sums == pytest.approx(squares(before, now, before + now), rel=1e-5)
    assert np.array_equal(sample, now.reshape(-1))


@pytest.mark.parametrize("cosine", [-0.5, 0.0, 0.9])
@pytest.mark.parametrize("kind", ["dense", "sparse", "low rank"])
def test_the_sample_of_a_large_tensor_has_its_cosine(kind: str, cosine: float) -> None:
    random, shape = np.random.default_rng(1), (1024, 1024)
    pair = random.standard_normal((2, *shape))
    if kind == "sparse":
        pair *= random.random(shape) < 0.05
    if kind == "low rank":
        columns = random.standard_normal((4, 1024))
        pair = np.stack([np.outer(*columns[:2]), np.outer(*columns[2:])])
    one = pair[0] / np.linalg.norm(pair[0])
    rest = pair[1] - (pair[1] * one).sum() * one
    other = cosine * one + math.sqrt(1 - cosine**2) * rest / np.linalg.norm(rest)
    sums, sample = kept_and_compared(one.astype(np.float32), other.astype(np.float32), TORCH)
    assert len(sample) < 140_000
    product = (sums[2] - sums[0] - sums[1]) / 2
    assert product / math.sqrt(sums[0] * sums[1]) == pytest.approx(cosine, abs=0.02)
    assert sums[:2] == pytest.approx([1.0, 1.0], abs=0.1)


def test_small_tensors_are_left_out() -> None:
    specs = [TensorSpec("large", (3000,), "float32"), TensorSpec("small", (100,), "float32")]
    (bucket,) = make_plan(specs, replace(LOWERS, min_numel=1000)).buckets
    assert {t.spec.name: t.numel for t in state_plan(bucket, EXCHANGED).tensors} == {
        "large": 3000,
        "small": 0,
    }


def worlds(backend: Backend, **settings: Any) -> World:
    return World(make_plan(SPECS, replace(LOWERS, **settings)), 2, backend)


@pytest.mark.parametrize("backend", [NUMPY, NATIVE], ids=lambda each: each.name)
def test_ranks_agree_on_the_factor_and_lower_it_only_when_asked(backend: Backend) -> None:
    swinging, still = worlds(backend), worlds(backend, lower_lr=False)
    for step in range(8):
        for world in (swinging, still):
            world.step(gradients(2, factor=(-1.0) ** step))
    values = {compressor.lr_factor_now() for compressor in swinging.ranks}
    assert len(values) == 1
    assert values.pop() == swinging.ranks[0].stats().lr_factor < 0.2
    assert [compressor.lr_factor_now() for compressor in still.ranks] == [1.0, 1.0]
    assert "lowering" not in still.ranks[0].state_dict()


def test_a_restarted_run_has_the_same_factor() -> None:
    one, other = (worlds(NUMPY) for _ in range(2))
    for step in range(8):
        one.step(gradients(2, seed=step, factor=(-1.0) ** step))
        if step == 4:
            for compressor, new in zip(one.ranks, other.ranks, strict=True):
                new.load_state_dict(compressor.state_dict())
        if step > 4:
            other.step(gradients(2, seed=step, factor=(-1.0) ** step))
    for compressor, new in zip(one.ranks, other.ranks, strict=True):
        assert compressor.state_dict()["lowering"] == new.state_dict()["lowering"]
    one.ranks[0].reset()
    assert "lowering" not in one.ranks[0].state_dict()


def test_a_rank_that_has_forgotten_all_has_the_factor_of_the_others() -> None:
    world = worlds(NUMPY)
    for step in range(8):
        world.step(gradients(2, factor=(-1.0) ** step))
    world.ranks[1].reset()
    world.step(gradients(2))
    assert world.ranks[0].lr_factor_now() == world.ranks[1].lr_factor_now() < 0.5


def test_a_state_is_of_no_use_where_the_rate_is_not_lowered() -> None:
    lowered, still = worlds(NUMPY), worlds(NUMPY, lower_lr=False)
    for step in range(8):
        lowered.step(gradients(2, factor=(-1.0) ** step))
    for one, other in zip(lowered.ranks, still.ranks, strict=True):
        other.load_state_dict(one.state_dict())
    still.step(gradients(2))
    assert still.ranks[0].lr_factor_now() == 1.0
    assert "lowering" not in still.ranks[0].state_dict()


@pytest.mark.parametrize("way", ["absent", "of another size"])
def test_kept_gradients_that_do_not_fit_are_no_error(way: str) -> None:
    """Checkpoints of older versions have none, and those of another `min_numel` have others."""
    one, other = worlds(NUMPY), worlds(NUMPY, min_numel=100)
    for world in (one, other):
        for step in range(3):
            world.step(gradients(2, seed=step))
    state = (one if way == "absent" else other).ranks[0].state_dict()
    if way == "absent":
        del state[f"state.{EXCHANGED}"]
    one.ranks[0].load_state_dict(state)
    kept = one.ranks[0].state_dict()[f"state.{EXCHANGED}"]["residuals"]
    assert not any(each.any() for each in kept.values())


@pytest.mark.parametrize("saved", [[1.0], [1.0, 2.0], [-1.0, 0.0], [1.0, math.nan], "x"])
def test_a_damaged_state_is_refused(saved: Any) -> None:
    (rank, _) = worlds(NUMPY).ranks
    with pytest.raises(StateDictError, match="'lowering'"):
        rank.load_state_dict(rank.state_dict() | {"lowering": saved})


def test_only_adam_whose_momentum_is_taken_over_is_lowered() -> None:
    taken = TopK(momentum=0.9, taken_over=True, lower_lr=True)
    check_lowers(taken, "Adam", is_adam=True)
    check_lowers(replace(taken, lower_lr=False), "SGD", is_adam=False)
    for config, is_adam in ((taken, False), (replace(taken, taken_over=False), True)):
        with pytest.raises(ConfigError, match="lower_lr=True was given, and SGD is no Adam"):
            check_lowers(config, "SGD", is_adam=is_adam)


@pytest.fixture
def lent() -> Any:
    """An AdamW, and the loan that has halved its learning rate."""
    optimizer = torch.optim.AdamW(nn.Linear(3, 2).parameters(), lr=0.5, weight_decay=0.1)
    names = {p: str(i) for i, p in enumerate(optimizer.param_groups[0]["params"])}
    loan = Loan(optimizer, names, 1.0)
    loan.lends_for(Watch(None), lambda: 0.5)
    loan.now()
    loan.lend(optimizer)
    loan.lower(optimizer)
    return optimizer, loan


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_a_loan_lowers_the_rate_and_not_decoupled_decay(kind: Any) -> None:
    optimizer = kind(nn.Linear(3, 2).parameters(), lr=0.5, weight_decay=0.1)
    names = {p: str(i) for i, p in enumerate(optimizer.param_groups[0]["params"])}
    loan = Loan(optimizer, names, 1.0)
    loan.lends_for(Watch(None), lambda: 0.5)
    loan.now()
    (group,) = optimizer.param_groups
    loan.lend(optimizer)
    loan.lower(optimizer)
    decay = 0.2 if kind is torch.optim.AdamW else 0.1
    assert (group["lr"], group["weight_decay"]) == (0.25, decay)
    loan.take_back(optimizer)
    assert (group["lr"], group["weight_decay"], group["betas"]) == (0.5, 0.1, (0.9, 0.999))


def test_what_a_user_sets_after_a_failed_step_stays(lent: Any) -> None:
    optimizer, loan = lent
    (group,) = optimizer.param_groups
    group["lr"] = 0.125
    loan.take_back(optimizer)
    assert (group["lr"], group["weight_decay"], group["betas"]) == (0.125, 0.1, (0.9, 0.999))
