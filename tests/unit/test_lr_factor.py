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

from horovod_topk.core.lr_factor import LearningRateFactor, compare, sample_plan
from horovod_topk.core.momentum_takeover import fitted, lowering
from horovod_topk.core.plan import TensorSpec, make_plan
from horovod_topk.core.residual import Arenas
from horovod_topk.errors import ConfigError, StateDictError
from horovod_topk.methods.topk import TopK
from horovod_topk.torch_training.momentum import Loan

Array = np.ndarray
LOWERS = TopK(ratio=0.1, min_numel=0, momentum=0.6, lower_lr=True)


def by_formula(cosines: list[float]) -> float:
    mean = 0.0
    for count, cosine in enumerate(cosines, 1):
        mean += (cosine - mean) / min(count, 20)
    return 1 / (1 + 50 * max(0.0, -mean - 0.01))


def test_the_factor_follows_cosines_of_neighbours() -> None:
    random = np.random.default_rng(0)
    gradients = random.standard_normal((60, 40)) + np.outer((-1.0) ** np.arange(60), np.ones(40))
    factor, cosines = LearningRateFactor(), list[float]()
    for before, now in pairwise(gradients):
        factor.observe(*map(float, (before @ now, before @ before, now @ now)))
        cosines.append(float(before @ now / np.linalg.norm(before) / np.linalg.norm(now)))
        assert factor.value == pytest.approx(by_formula(cosines))
    assert factor.value < 0.1
    assert factor.seen == 59


def test_gradients_that_agree_leave_the_learning_rate_alone() -> None:
    factor = LearningRateFactor()
    for _ in range(5):
        factor.observe(5.0, 5.0, 5.0)
    assert (factor.value, factor.mean) == (1.0, 1.0)


@pytest.mark.parametrize("square", [0.0, math.inf, math.nan])
def test_where_there_is_no_angle_nothing_changes(square: float) -> None:
    factor = LearningRateFactor()
    factor.observe(-1.0, 1.0, 1.0)
    factor.observe(square, square, 1.0)
    factor.observe(square, 1.0, square)
    assert factor.saved() == [1.0, -1.0]


def test_it_goes_on_from_what_was_saved() -> None:
    one, other = LearningRateFactor(), LearningRateFactor()
    assert one.saved() == []
    one.observe(-1.0, 2.0, 3.0)
    other.load(one.saved())
    for each in (one, other):
        each.observe(0.5, 3.0, 1.0)
    assert (one.value, one.saved()) == (other.value, other.saved())
    one.load([])
    assert one.saved() == []


def kept_and_compared(before: Array, now: Array, backend: Backend) -> tuple[list[float], Array]:
    """The sums of two steps, and the sample of the second."""
    (bucket,) = make_plan([TensorSpec("a", before.shape, "float32")], LOWERS).buckets
    plan, ops = sample_plan(bucket), backend.ops
    arenas = Arenas(plan, *(ops.zeros(plan.numel, "float32", "cpu") for _ in range(2)))
    for each in (before, now):
        gradient = backend.array(each.reshape(-1), "float32")
        sums = backend.numpy(compare(bucket, arenas, [gradient], ops))
        arenas.swap()
    assert sums.dtype == np.float64
    return sums.tolist(), backend.numpy(arenas.residual)


@pytest.mark.parametrize("backend", [NUMPY, TORCH, NATIVE, TENSORFLOW], ids=lambda each: each.name)
def test_a_tensor_of_usual_size_is_compared_whole(backend: Backend) -> None:
    random = np.random.default_rng(0)
    before, now = random.standard_normal((2, 300, 90)).astype(np.float32)
    sums, sample = kept_and_compared(before, now, backend)
    exact = [(a.astype(float) * b).sum() for a, b in ((before, now), (before, before), (now, now))]
    assert sums == pytest.approx(exact, rel=1e-6, abs=1e-3)
    assert np.array_equal(sample, now.reshape(-1))
    reference, _ = kept_and_compared(before, now, NUMPY)
    assert sums == reference, "to the bit"


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
    assert sums[0] / math.sqrt(sums[1] * sums[2]) == pytest.approx(cosine, abs=0.02)
    assert sums[1:] == pytest.approx([1.0, 1.0], abs=0.1)


def test_small_tensors_are_left_out() -> None:
    specs = [TensorSpec("large", (3000,), "float32"), TensorSpec("small", (100,), "float32")]
    (bucket,) = make_plan(specs, replace(LOWERS, min_numel=1000)).buckets
    assert {t.spec.name: t.numel for t in sample_plan(bucket).tensors} == {
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
    values = {compressor.stats().lr_factor for compressor in swinging.ranks}
    assert len(values) == 1
    assert values.pop() < 0.2
    assert [compressor.stats().lr_factor for compressor in still.ranks] == [1.0, 1.0]
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
    clock = one.ranks[0].clock
    assert clock.lowering == tuple(one.ranks[0].state_dict()["lowering"])
    one.ranks[0].reset()
    assert one.ranks[0].stats().lr_factor == 1.0


@pytest.mark.parametrize("saved", [[1.0], [1.0, 2.0], [-1.0, 0.0], [1.0, math.nan], "x"])
def test_a_damaged_state_is_refused(saved: Any) -> None:
    (rank, _) = worlds(NUMPY).ranks
    with pytest.raises(StateDictError, match="'lowering'"):
        rank.load_state_dict(rank.state_dict() | {"lowering": saved})


def test_only_adam_with_everything_left_to_it_is_lowered() -> None:
    auto = {"momentum": "auto", "lower_lr": "auto"}
    settings = TopK(velocity_kept="auto")
    assert fitted(settings, auto, normalises=True).lower_lr
    assert not fitted(settings, auto, normalises=False).lower_lr
    assert not fitted(TopK(velocity_kept=0.5), auto, normalises=True).lower_lr
    config = replace(settings, lower_lr=True)
    assert not lowering(config, auto, "Adam", is_adam=True).lower_lr
    taken = replace(config, momentum=0.9, taken_over=True)
    assert lowering(taken, auto, "Adam", is_adam=True).lower_lr
    with pytest.raises(ConfigError, match="lower_lr=True was given, and SGD is no Adam"):
        lowering(taken, {}, "SGD", is_adam=False)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_a_loan_lowers_the_rate_and_not_decoupled_decay(kind: Any) -> None:
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.5, weight_decay=0.1)
    loan = Loan(optimizer, {p: str(i) for i, p in enumerate(model.parameters())}, 1.0)
    loan._lr_factor.load([9.0, -0.03])
    loan.now()
    (group,) = optimizer.param_groups
    loan.lend(optimizer)
    assert group["lr"] == 0.5 * loan._lr_factor.value == pytest.approx(0.25)
    decay = 0.2 if kind is torch.optim.AdamW else 0.1
    assert group["weight_decay"] == pytest.approx(decay)
    loan.take_back(optimizer)
    assert (group["lr"], group["weight_decay"], group["betas"]) == (0.5, 0.1, (0.9, 0.999))
