"""A run that goes on from a checkpoint is, to the bit, the one that never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import training
from horovod_topk import checkpoint
from plain import PlainTopKEF as TopKEF
from resuming import assert_resumes
from training import Setup
from witness import assert_ranks_equal, assert_residuals, bits, residuals
from world import hvd

SETTINGS = [
    {"exchange": "allgather", "values": "float32"},
    {"exchange": "allgather", "values": "int4"},
    {"exchange": "sharded", "values": "int8"},
    {"exchange": "hierarchical", "values": "int8"},
]


def start(settings: Any) -> tuple[Any, Any]:
    setup = Setup(optimizer=training.adamw)
    return setup.start(TopKEF(ratio=0.1, min_numel=0, **settings))


@pytest.mark.world_size(2, 4)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_resume_is_bitwise(settings: Any, tmp_path: Path) -> None:
    assert_resumes(lambda: start(settings), tmp_path)


def embedded() -> tuple[Any, Any]:
    setup = Setup(build=training.Embedded, optimizer=training.plain_sgd)
    return setup.start(TopKEF(ratio=0.1, min_numel=0))


@pytest.mark.horovod
@pytest.mark.parametrize("before", ["the first step", "the others"])
def test_sparse_gradients_leave_the_checkpoint_loadable(before: str, tmp_path: Path) -> None:
    """Theirs is Horovod's path from the first one on, also where that comes after the load."""
    folder = hvd.broadcast_object(tmp_path, root_rank=0, name="folder")
    task, optimizer = embedded()
    if before == "the others":
        training.train(task, optimizer, range(2))
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
