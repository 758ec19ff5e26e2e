"""A run that goes on from a checkpoint is, to the bit, the one that never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import training
from horovod_topk import checkpoint
from plain import PlainTopKEF as TopKEF
from training import Setup
from witness import assert_ranks_equal, assert_residuals, bits, residuals
from world import hvd

SETTINGS = [
    {"exchange": "allgather", "values": "float32"},
    {"exchange": "allgather", "values": "int4"},
    {"exchange": "sharded", "values": "int8"},
    {"exchange": "hierarchical", "values": "int8"},
]


def shared(folder: Path) -> Path:
    """Rank 0's folder, on every rank."""
    return hvd.broadcast_object(folder, root_rank=0, name="folder")


def start(settings: Any) -> tuple[Any, Any]:
    setup = Setup(optimizer=training.adamw)
    task = setup.task()
    return task, setup.distributed(task, TopKEF(ratio=0.1, min_numel=0, **settings))


@pytest.mark.world_size(2, 4)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_resume_is_bitwise(settings: Any, tmp_path: Path) -> None:
    folder = shared(tmp_path)
    task, optimizer = start(settings)
    for step in range(4):
        training.ordinary(task, optimizer, step)
    checkpoint.save(folder, TopKEF.of(optimizer))
    torch.save([task.state_dict(), optimizer.state_dict()], tmp_path / "rest")
    for step in range(4, 8):
        training.ordinary(task, optimizer, step)

    again, other = start(settings)
    model, rest = torch.load(tmp_path / "rest", weights_only=True)
    again.load_state_dict(model)
    other.load_state_dict(rest)
    hvd.barrier()
    checkpoint.load(folder, TopKEF.of(other))
    for step in range(4, 8):
        training.ordinary(again, other, step)
    assert torch.equal(bits(again.parameters()), bits(task.parameters()))
    assert_ranks_equal(again.parameters())
    assert_residuals(other, residuals(optimizer))


def embedded() -> tuple[Any, Any]:
    setup = Setup(build=training.Embedded, optimizer=training.plain_sgd)
    task = setup.task()
    return task, setup.distributed(task, TopKEF(ratio=0.1, min_numel=0))


@pytest.mark.horovod
@pytest.mark.parametrize("before", ["the first step", "the others"])
def test_sparse_gradients_leave_the_checkpoint_loadable(before: str, tmp_path: Path) -> None:
    """Theirs is Horovod's path from the first one on, also where that comes after the load."""
    folder, (task, optimizer) = shared(tmp_path), embedded()
    if before == "the others":
        for step in range(2):
            training.ordinary(task, optimizer, step)
    checkpoint.save(folder, TopKEF.of(optimizer))
    hvd.barrier()
    again, other = embedded()
    if before == "the first step":
        training.ordinary(again, other, 9)
    again.load_state_dict(task.state_dict())
    checkpoint.load(folder, TopKEF.of(other))
    for step in range(2, 4):
        training.ordinary(task, optimizer, step)
        training.ordinary(again, other, step)
    assert torch.equal(bits(again.parameters()), bits(task.parameters()))
    assert_residuals(other, residuals(optimizer))
    assert_ranks_equal(again.parameters())
