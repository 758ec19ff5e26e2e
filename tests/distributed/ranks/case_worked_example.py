"""The worked example of a compression method trains in PyTorch, also after a checkpoint."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import horovod.torch as hvd
import pytest
import torch

import horovod_topk.torch
import training
from horovod_topk import checkpoint
from plain import PlainTopKEF as TopKEF
from training import Setup
from witness import assert_ranks_equal, assert_residuals, bits, residuals
from worked_example import register


@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
def test_it_trains_and_resumes_to_the_bit(exchange: str, tmp_path: Path) -> None:
    method = register(tmp_path)
    folder = hvd.broadcast_object(tmp_path, root_rank=0, name="folder")
    compressor = getattr(horovod_topk.torch, method.__name__)
    setup = Setup(optimizer=training.adamw)
    task, again = setup.task(), setup.task()
    optimizer, other = (
        setup.distributed(each, compressor(exchange=exchange, min_numel=16))
        for each in (task, again)
    )
    before = task.loss(hvd.rank(), 0).item()
    for step in range(4):
        training.ordinary(task, optimizer, step)
    checkpoint.save(folder, TopKEF.of(optimizer))
    again.load_state_dict(task.state_dict())
    other.load_state_dict(deepcopy(optimizer.state_dict()))
    hvd.barrier()
    checkpoint.load(folder, TopKEF.of(other))
    for step in range(4, 40):
        training.ordinary(task, optimizer, step)
        training.ordinary(again, other, step)
    assert torch.equal(bits(again.parameters()), bits(task.parameters()))
    assert_ranks_equal(task.parameters())
    assert_residuals(other, residuals(optimizer))
    assert TopKEF.of(optimizer).stats().residual_norm > 0
    assert TopKEF.of(optimizer).stats().reduction > 2
    assert task.loss(hvd.rank(), 0).item() < before
