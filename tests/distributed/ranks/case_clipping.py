"""Clipping on each rank: what is far too large neither blows up nor lingers in the residual."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.amp import GradScaler

import training
from plain import PlainTopKEF as TopKEF
from training import Setup, Task
from witness import (
    assert_ranks_equal,
    assert_residuals,
    assert_same,
    nothing_changes,
    residuals,
    spoiled,
)
from world import hvd

SPARSE = {"ratio": 0.1, "min_numel": 0}
LIMIT = 2.0
SPIKE = 3  # the step in which rank 1 has a gradient that is far too large
PLAIN = Setup(optimizer=training.plain_sgd)


def loss(task: Task, step: int, factor: float) -> torch.Tensor:
    return task.loss(hvd.rank(), step) * (factor if step == SPIKE and hvd.rank() == 1 else 1.0)


def run(settings: dict[str, Any], factor: float = 1.0, steps: int = 12) -> tuple[Any, Any, Any]:
    """A task, its optimizer, and norms of residual and gradient after each step."""
    task, optimizer = PLAIN.start(TopKEF(**settings))
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        loss(task, step, factor).backward()
        optimizer.step()
        stats = TopKEF.of(optimizer).stats()
        norms.append((stats.residual_norm, stats.gradient_norm))
    return task, optimizer, norms


def threshold() -> float:
    return LIMIT * math.sqrt(hvd.size())


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
def test_a_gradient_far_too_large(exchange: str) -> None:
    settings = SPARSE | {"exchange": exchange, "clip_norm": LIMIT}
    task, _, norms = run(settings, 100.0)
    _, _, calm = run(settings)
    usual = max(residual for residual, _ in calm)
    assert all(gradient <= threshold() * (1 + 1e-5) for _, gradient in norms)
    if hvd.rank() == 1:
        assert norms[SPIKE][1] == pytest.approx(threshold(), rel=1e-5)
    assert all(residual < usual + threshold() for residual, _ in norms)
    assert norms[-1][0] < 1.5 * calm[-1][0]
    assert_ranks_equal(task.parameters())


def test_a_loss_scale_does_not_change_what_is_clipped() -> None:
    settings = SPARSE | {"clip_norm": 0.5}
    task, optimizer, _ = run(settings, steps=4)
    scaled, scaler = PLAIN.task(), GradScaler("cpu", init_scale=256.0)
    other = PLAIN.distributed(scaled, TopKEF(**settings, grad_scaler=scaler))
    for step in range(4):
        other.zero_grad()
        scaler.scale(loss(scaled, step, 1.0)).backward()
        other.synchronize()
        with other.skip_synchronize():
            scaler.step(other)
        scaler.update(2.0 ** (step + 3))
    assert_same(training.snapshot(scaled), training.snapshot(task))
    assert_residuals(other, residuals(optimizer))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_flagged(value: float) -> None:
    task, optimizer, _ = run(SPARSE | {"clip_norm": 0.5}, steps=3)
    with nothing_changes(task, optimizer):
        optimizer.zero_grad()
        with spoiled(next(task.parameters()), value) if hvd.rank() == 0 else nullcontext():
            task.loss(hvd.rank(), 50).backward()
        optimizer.synchronize()
        assert next(task.parameters()).grad.isnan().all()
        optimizer.zero_grad()


@pytest.mark.horovod
def test_several_passes_are_clipped_as_one() -> None:
    """What is clipped is what is sent."""
    setup = Setup(
        optimizer=training.plain_sgd,
        options={"backward_passes_per_step": 2},
        take_step=training.accumulated(2),
    )
    task, optimizer = setup.start(TopKEF(**SPARSE, clip_norm=0.01))
    for step in range(3):
        setup.take_step(task, optimizer, step)
        norm = TopKEF.of(optimizer).stats().gradient_norm
        assert norm == pytest.approx(0.01 * math.sqrt(hvd.size()), rel=1e-4)
