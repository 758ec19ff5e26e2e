"""A run that goes on from a checkpoint is, to the bit, the one that never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import horovod.torch as hvd
import pytest
import torch

import training
from horovod_topk import checkpoint
from horovod_topk.errors import CheckpointError
from horovod_topk.torch import TopKEF
from training import Setup
from witness import assert_ranks_equal, assert_residuals, bits, residuals

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


def test_another_rank_s_folder_is_refused_before_anything_changes(tmp_path: Path) -> None:
    """Folders that are not shared: each rank finds its own shard only if it saved it there."""
    task, optimizer = start(SETTINGS[0])
    training.ordinary(task, optimizer, 0)
    path = checkpoint.save(tmp_path, TopKEF.of(optimizer))
    assert path is not None
    path.rename(path.with_name(f"topkef-{1 - hvd.rank():05}-of-00002.safetensors"))
    before = residuals(optimizer)
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.load(tmp_path, TopKEF.of(optimizer))
    assert_residuals(optimizer, before)
