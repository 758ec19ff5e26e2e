"""The guard on real ranks: all fall back in the same step, then train as dense training does."""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import pytest
import torch

import training
from horovod_topk import report
from horovod_topk.guard import Guard
from training import Setup, Task
from witness import (
    assert_close,
    assert_ranks_equal,
    assert_same_history,
    spoiled,
)
from world import TopKEF, hvd

STORM = Guard(nonfinite=2, trend=None, residual=None)
SPARSE = {"ratio": 0.05, "min_numel": 0, "warmup": None}


def nesterov(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)


def rising(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.001, momentum=0.9, maximize=True)


def in_two_groups(parameters: Any) -> torch.optim.Optimizer:
    every = list(parameters)
    groups = [{"params": every[:2], "momentum": 0.5}, {"params": every[2:], "momentum": 0.9}]
    return torch.optim.SGD(groups, lr=0.05)


def storm(task: Task, optimizer: Any, steps: range) -> None:
    """Take steps with a NaN on the last rank, and skip their updates, as a loss scaler does."""
    for step in steps:
        if hvd.rank() == hvd.size() - 1:
            with spoiled(next(iter(task.parameters())), math.nan):
                training.thrown_away(task, optimizer, step)
        else:
            training.thrown_away(task, optimizer, step)


def fallen(setup: Setup, compressor: Any, after: int = 2) -> tuple[Task, Any, list[Any]]:
    """Train until the guard has fallen back; return the task, the optimizer and all counters."""
    task, seen = setup.task(), list[Any]()
    optimizer = setup.distributed(task, compressor)
    TopKEF.of(optimizer).on_step(seen.append)
    training.train(task, optimizer, range(4))
    storm(task, optimizer, range(4, 6))
    training.train(task, optimizer, range(6, 6 + after))
    return task, optimizer, seen


def dense_from(setup: Setup, task: Task, optimizer: Any) -> tuple[Task, Any]:
    """Set up training without compression from the state of another run."""
    twin = setup.task()
    twin.load_state_dict(task.state_dict())
    dense = setup.distributed(twin, hvd.Compression.none)
    dense.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return twin, dense


@pytest.mark.world_size(2)
@pytest.mark.everywhere
@pytest.mark.parametrize(
    "optimizer", [training.plain_sgd, nesterov, training.adamw, rising, in_two_groups]
)
@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
def test_from_there_on_it_is_dense_training_to_the_bit(optimizer: Any, exchange: str) -> None:
    setup = Setup(optimizer=optimizer)
    task, ours, seen = fallen(setup, TopKEF(**SPARSE, exchange=exchange, guard=STORM))
    assert [each.fell_back for each in seen] == [*[""] * 5, "non-finite", "", ""]
    assert [each.level for each in seen] == [*[0.05] * 6, 1.0, 1.0]
    twin, dense = dense_from(setup, task, ours)
    history: tuple[list[Any], list[Any]] = [], []
    for step in range(8, 14):
        for kept, trained, its in zip(history, (task, twin), (ours, dense), strict=True):
            training.ordinary(trained, its, step)
            kept.append(training.snapshot(trained))
    assert_same_history(*history)
    assert_ranks_equal(task.parameters())
    stats = TopKEF.of(ours).stats()
    assert (stats.residual_norm, stats.momentum, stats.level) == (0.0, 0.0, 1.0)
    assert stats.fallbacks == {"non-finite": 1}


@pytest.mark.world_size(3)
@pytest.mark.parametrize("settings", [{}, {"exchange": "sharded"}, {"values": "int8"}], ids=str)
def test_with_more_ranks_it_is_dense_training_within_rounding(settings: dict[str, Any]) -> None:
    """Dense gradients are reduced by owners and sent back, instead of gathered on every rank."""
    task, ours, _ = fallen(Setup(), TopKEF(**SPARSE | settings, guard=STORM))
    twin, dense = dense_from(Setup(), task, ours)
    for step in range(8, 20):
        training.ordinary(task, ours, step)
        training.ordinary(twin, dense, step)
    assert_close(training.snapshot(task), training.snapshot(twin))
    assert_ranks_equal(task.parameters())
    assert TopKEF.of(ours).stats().exchange == ("sharded" if "exchange" in settings else "reduce")


@pytest.mark.world_size(2, 3)
def test_one_rank_whose_loss_rises_takes_all_with_it(caplog: pytest.LogCaptureFixture) -> None:
    task, seen = Setup().task(), list[Any]()
    optimizer = Setup().distributed(task, TopKEF(**SPARSE, guard=Guard()))
    TopKEF.of(optimizer).on_step(seen.append)
    with caplog.at_level(logging.WARNING, "horovod_topk"):
        for step in range(45):
            training.ordinary(task, optimizer, step)
            diverges = hvd.rank() == 1 and step > 30
            report(math.nan if diverges else 1.0 + 0.1 * (step % 2))
    fell = [(each.step, each.fell_back) for each in seen if each.fell_back]
    assert hvd.allgather_object(fell) == [fell] * hvd.size()
    assert fell == [(36, "trend")]  # one step after the fourth bad report
    lines = [each.getMessage() for each in caplog.records if "guard" in each.getMessage()]
    assert len(lines) == (3 if hvd.rank() == 0 else 0), lines
    warnings = TopKEF.of(optimizer).stats().warnings
    assert hvd.allgather_object(warnings) == [warnings] * hvd.size()
    assert "on rank 1 the reported value is a NaN" in warnings[-3]
    assert "All ranks go back to dense gradients" in warnings[-2]
    assert_ranks_equal(task.parameters())
