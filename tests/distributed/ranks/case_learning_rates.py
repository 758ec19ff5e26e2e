"""Residuals that follow the learning rates of parameter groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import training
from plain import PlainTopKEF as TopKEF
from training import Setup, Task
from witness import assert_ranks_equal, residuals
from world import hvd

SPARSE = {"ratio": 0.05, "min_numel": 0}
DAMPING = (0.2, 1.0, 1.0, 0.95, 0.92, 0.9)  # of a learning rate, step by step


def groups_of(task: Any) -> Any:
    first, *others = task.parameters()
    return [{"params": [first], "lr": 0.05}, {"params": others, "lr": 0.2}]


SETUP = Setup(optimizer=training.plain_sgd, parameter_groups=groups_of)


def take(task: Task, optimizer: Any, step: int) -> None:
    """A step at that step's rates."""
    for group, rate in zip(optimizer.param_groups, (0.05, 0.2), strict=True):
        group["lr"] = rate * DAMPING[step]
    training.ordinary(task, optimizer, step)


def mean(tensor: Tensor, name: str) -> Tensor:
    """Over ranks, in float64."""
    averaged: Tensor = hvd.allreduce(tensor.detach().double(), name=name)
    return averaged


def gap(exchange: str, *, follow_lr: bool) -> float:
    """By how much updates and what is owed miss all gradients at their rates, at most."""
    task = SETUP.task()
    compression = TopKEF(**SPARSE, exchange=exchange, follow_lr=follow_lr)
    optimizer = SETUP.distributed(task, compression)
    begun, names = training.snapshot(task), [name for name, _ in task.named_parameters()]
    due = [torch.zeros_like(p, dtype=torch.float64) for p in task.parameters()]
    for step, factor in enumerate(DAMPING):
        gradients = torch.autograd.grad(task.loss(hvd.rank(), step), list(task.parameters()))
        for i, gradient in enumerate(gradients):
            due[i] += (0.05 if i == 0 else 0.2) * factor * mean(gradient, f"case.{i}")
        take(task, optimizer, step)
    assert_ranks_equal(task.parameters())
    owed, worst = residuals(optimizer), 0.0
    for i, (name, p) in enumerate(zip(names, task.parameters(), strict=True)):
        rate = (0.05 if i == 0 else 0.2) * DAMPING[-1]
        left = rate * mean(owed[name], f"case.owed.{i}").view(p.shape)
        missed = begun[i].double() - p.detach().double() + left - due[i]
        worst = max(worst, float(missed.norm() / due[i].norm()))
    return worst


@pytest.mark.world_size(2, 3)
def test_updates_and_what_is_owed_are_all_gradients_at_their_rates() -> None:
    assert gap("allgather", follow_lr=True) < 1e-5
    assert gap("allgather", follow_lr=False) > 1e-2
