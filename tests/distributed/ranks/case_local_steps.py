"""Local steps over real collectives; their laws are tests/properties/test_local_steps.py."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import training
from horovod_topk import checkpoint
from horovod_topk.errors import PlanMismatchError
from witness import assert_close, assert_ranks_equal, assert_same
from world import adapter, hvd

SMALL: dict[str, Any] = {"ratio": 0.1, "min_numel": 8}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"every": 3, "decay": 0.95},
    "sharded": {"every": 3, "compression": lambda: adapter.TopKEF(**SMALL, exchange="sharded")},
    "in the background": {"every": 4, "fragments": 2, "delay": 3},
    "in the background, two rounds": {"every": 4, "delay": 3, "compression": adapter.Dense},
    "seconds": {"every": "0.02s", "clip": 2.0},
}


def local_steps(task: training.Task, **settings: Any) -> Any:
    inner = torch.optim.AdamW(task.parameters(), lr=0.01)
    made = {"compression": adapter.TopKEF(**SMALL), **settings}
    if not isinstance(made["compression"], adapter.TopKEF | type):
        made["compression"] = made["compression"]()
    return adapter.LocalSteps(inner, task.named_parameters(), **made)


def started() -> training.Task:
    torch.manual_seed(0)
    return training.perceptron()


def take(task: training.Task, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    task.loss(hvd.rank(), step).backward()
    optimizer.step()


@pytest.mark.everywhere
@pytest.mark.world_size(2, 3, 4)
@pytest.mark.parametrize("setting", SETTINGS)
def test_ranks_end_with_equal_weights(setting: str) -> None:
    task = started()
    optimizer = local_steps(task, **SETTINGS[setting])
    step = 0
    while optimizer.rounds < 4:
        take(task, optimizer, step)
        step += 1
    optimizer.synchronize()
    assert_ranks_equal(task.parameters())
    assert adapter.TopKEF.of(optimizer).stats().rolled_back == 0
    pairs = zip(task.parameters(), started().parameters(), strict=True)
    assert not all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.world_size(2, 3)
def test_dense_is_the_mean_of_the_weights() -> None:
    task, alone = started(), started()
    optimizer = local_steps(task, every=3, compression=adapter.Dense, outer=adapter.Outer())
    inner = torch.optim.AdamW(alone.parameters(), lr=0.01)
    for step in range(3):
        take(task, optimizer, step)
        take(alone, inner, step)
    means = [hvd.allreduce(p.detach(), name=f"mean.{i}") for i, p in enumerate(alone.parameters())]
    assert_close(training.snapshot(task), means, relative=1e-5)


def test_a_restart_goes_on_to_the_bit_in_the_middle_of_a_round(tmp_path: Path) -> None:
    folder = Path(hvd.broadcast_object(str(tmp_path)))
    settings = {"every": 4, "outer": adapter.Outer(lr=0.7, momentum=0.9), "delay": 2}
    task = started()
    optimizer = local_steps(task, **settings)
    for step in range(6):  # an exchange is in the background
        take(task, optimizer, step)
    checkpoint.save(folder, adapter.TopKEF.of(optimizer))
    saved = training.snapshot(task), copy.deepcopy(optimizer.state_dict())
    other = started()
    for p, was in zip(other.parameters(), saved[0], strict=True):
        p.data.copy_(was)
    resumed = local_steps(other, **settings)
    resumed.load_state_dict(saved[1])
    hvd.barrier()
    checkpoint.load(folder, adapter.TopKEF.of(resumed))
    for step in range(6, 14):
        take(task, optimizer, step)
        take(other, resumed, step)
    assert_same(training.snapshot(other), training.snapshot(task))


@pytest.mark.world_size(2, 3)
def test_a_rank_with_a_nan_goes_on_from_the_anchor() -> None:
    task = started()
    optimizer = local_steps(task, every=2)
    for step in range(2):
        take(task, optimizer, step)
    before = training.snapshot(task)
    take(task, optimizer, 2)
    if hvd.rank() == 1:
        next(task.parameters()).data[0] = torch.nan
    take(task, optimizer, 3)
    assert_same(training.snapshot(task), before)
    for step in range(4, 8):
        take(task, optimizer, step)
    assert_ranks_equal(task.parameters())
    assert adapter.TopKEF.of(optimizer).stats().rolled_back == 1


def test_other_weights_are_refused_on_every_rank() -> None:
    task = started()
    optimizer = local_steps(task)
    if hvd.rank() == 1:
        next(task.parameters()).data[0] += 1.0
    with pytest.raises(PlanMismatchError, match="different weights before the first step"):
        take(task, optimizer, 0)


def test_two_optimizers_of_one_model() -> None:
    task = started()
    named = list(task.named_parameters())
    halves = [
        adapter.LocalSteps(torch.optim.SGD([p for _, p in half], lr=0.1), half, every=2)
        for half in (named[:3], named[3:])
    ]
    for step in range(4):
        task.zero_grad()
        task.loss(hvd.rank(), step).backward()
        for each in halves:
            each.step()
    assert_ranks_equal(task.parameters())
