"""The guard on real ranks: all fall back in the same step, then train as dense training does."""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import pytest
import torch

import training
from horovod_topk import checkpoint, report
from horovod_topk.errors import ConfigError
from horovod_topk.guard import Guard
from training import Setup, Task
from witness import (
    assert_close,
    assert_ranks_equal,
    assert_same,
    assert_same_history,
    bits,
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
    for step in range(4):
        training.ordinary(task, optimizer, step)
    storm(task, optimizer, range(4, 6))
    for step in range(6, 6 + after):
        training.ordinary(task, optimizer, step)
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


@pytest.mark.parametrize("optimizer", [training.sgd, training.adamw])
def test_it_comes_back_after_a_cool_down(optimizer: Any) -> None:
    guard = Guard(nonfinite=2, trend=None, residual=None, cool_down=3)
    task, ours, seen = fallen(Setup(optimizer=optimizer), TopKEF(**SPARSE, guard=guard), 7)
    assert [each.level for each in seen[6:]] == [1.0] * 4 + [0.05] * 3
    assert_ranks_equal(task.parameters())
    assert TopKEF.of(ours).stats().residual_norm > 0.0


@pytest.mark.parametrize("optimizer", [training.sgd, training.adamw])
@pytest.mark.parametrize("stage", [1, 2, 3, 5, 6, 8])
def test_a_checkpoint_goes_on_at_every_stage(
    stage: int, optimizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Stages: during the fall-back, after it, and after compression has come back."""
    pytest.importorskip("safetensors")
    setup = Setup(optimizer=optimizer)
    guard = Guard(nonfinite=2, trend=None, residual=None, cool_down=3)
    folder = hvd.broadcast_object(str(tmp_path_factory.mktemp("guard")))
    task, ours, _ = fallen(setup, TopKEF(**SPARSE, guard=guard), stage)
    checkpoint.save(folder, TopKEF.of(ours))
    hvd.barrier()
    again = setup.task()
    again.load_state_dict(task.state_dict())
    resumed = setup.distributed(again, TopKEF(**SPARSE, guard=guard, name="resumed"))
    resumed.load_state_dict(copy.deepcopy(ours.state_dict()))
    checkpoint.load(folder, TopKEF.of(resumed))
    for step in range(10, 18):
        training.ordinary(task, ours, step)
        training.ordinary(again, resumed, step)
        assert torch.equal(bits(task.parameters()), bits(again.parameters())), step
    assert TopKEF.of(ours).stats().fallbacks == TopKEF.of(resumed).stats().fallbacks


def saved(task: Any, optimizer: Any) -> tuple[Any, Any, Any]:
    """Copies of the states of the model, the optimizer and its compressor."""
    states = task.state_dict(), optimizer.state_dict(), TopKEF.of(optimizer).state_dict()
    return copy.deepcopy(states)


def load(kept: tuple[Any, Any, Any], task: Any, optimizer: Any) -> None:
    """Go back to what `saved` returned."""
    task.load_state_dict(kept[0])
    optimizer.load_state_dict(copy.deepcopy(kept[1]))
    TopKEF.of(optimizer).load_state_dict(kept[2])
    optimizer.zero_grad()


@pytest.mark.parametrize("optimizer", [training.sgd, training.adamw])
def test_a_run_that_goes_back_to_a_dense_step_comes_back_alike(optimizer: Any) -> None:
    guard = Guard(nonfinite=2, trend=None, residual=None, cool_down=3)
    task, ours, _ = fallen(Setup(optimizer=optimizer), TopKEF(**SPARSE, guard=guard), 3)
    kept = saved(task, ours)
    ends = list[Any]()
    for _ in range(2):
        for step in range(9, 15):
            training.ordinary(task, ours, step)
        ends.append(training.snapshot(task))
        load(kept, task, ours)
        training.ordinary(task, ours, 9)  # a dense step, which is taken back again
        load(kept, task, ours)
    assert_same(*ends)


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
    assert "on rank 1 the reported value has left its trend" in warnings[-3]
    assert "All ranks go back to dense gradients" in warnings[-2]
    assert_ranks_equal(task.parameters())


def test_a_quiet_guard_changes_no_bit() -> None:
    ours = training.trajectory(Setup(), TopKEF(**SPARSE, guard=Guard(slower=None)), 6)
    assert_same(ours[-1], training.trajectory(Setup(), TopKEF(**SPARSE, guard=None), 6)[-1])


def test_a_report_that_is_no_number_is_refused() -> None:
    setup = Setup()
    optimizer = setup.distributed(setup.task(), TopKEF(**SPARSE))
    for value in ("high", [1.0, 2.0], torch.zeros(2)):
        with pytest.raises(ConfigError, match="which is not one number"):
            TopKEF.of(optimizer).report(value)
    TopKEF.of(optimizer).report(torch.tensor([0.5]))
