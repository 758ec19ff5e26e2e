"""A run that goes on from a checkpoint is, to the bit, the one that never stopped."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

import training
from horovod_topk import checkpoint
from horovod_topk.errors import CheckpointError
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


def test_another_rank_s_folder_is_refused_before_anything_changes(tmp_path: Path) -> None:
    """Folders that are not shared: each rank finds its own shard only if it saved it there."""
    task, optimizer = start(SETTINGS[0])
    training.ordinary(task, optimizer, 0)
    path = checkpoint.save(tmp_path, TopKEF.of(optimizer))
    assert path is not None
    path.rename(path.with_name(f"topkef-{1 - hvd.rank():05}-of-00002.safetensors"))
    before = residuals(optimizer)
    with pytest.raises(CheckpointError, match="was saved by rank"):
        checkpoint.load(tmp_path, TopKEF.of(optimizer))
    assert_residuals(optimizer, before)


def test_shards_of_different_steps_are_told_apart_after_a_restart(tmp_path: Path) -> None:
    """Also where the run has been restarted in between, and counts steps anew."""
    folder = shared(tmp_path)
    task, first = start(SETTINGS[0])
    for step in range(3):
        training.ordinary(task, first, step)
    checkpoint.save(folder, TopKEF.of(first))
    hvd.barrier()
    task, second = start(SETTINGS[0])
    checkpoint.load(folder, TopKEF.of(second))
    assert (TopKEF.of(second).steps, TopKEF.of(second).stats().steps) == (3, 0)
    for step in range(3, 6):
        training.ordinary(task, second, step)
    hvd.barrier()
    if hvd.rank() == 0:
        checkpoint.save(folder, TopKEF.of(second))
    hvd.barrier()
    _, third = start(SETTINGS[0])
    checkpoint.load(folder, TopKEF.of(third))  # the newest one that is whole
    assert TopKEF.of(third).steps == 3


def test_a_ratio_that_was_asked_for_goes_on(tmp_path: Path) -> None:
    folder, warm = shared(tmp_path), {"warmup": [(1, 0.5)]}
    (task, optimizer), (again, other) = start(warm), start(warm)
    TopKEF.of(optimizer).set_ratio(0.5)
    for step in range(3):
        training.ordinary(task, optimizer, step)
    checkpoint.save(folder, TopKEF.of(optimizer))
    hvd.barrier()
    checkpoint.load(folder, TopKEF.of(other))
    again.load_state_dict(task.state_dict())
    other.load_state_dict(deepcopy(optimizer.state_dict()))
    for each, of in ((task, optimizer), (again, other)):
        training.ordinary(each, of, 3)
    assert TopKEF.of(other).ratio == 0.5
    assert torch.equal(bits(again.parameters()), bits(task.parameters()))
    assert_residuals(other, residuals(optimizer))


@pytest.mark.world_size(2)
def test_a_full_disk_on_one_rank_leaves_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shared(tmp_path)
    task, optimizer = start({"exchange": "allgather"})
    training.ordinary(task, optimizer, 0)
    checkpoint.save(folder, TopKEF.of(optimizer))
    saved = residuals(optimizer)
    training.ordinary(task, optimizer, 1)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    if hvd.rank() == 1:
        monkeypatch.setattr("os.fsync", full)
        with pytest.raises(CheckpointError, match=r"cannot be written: No space.*free space"):
            checkpoint.save(folder, TopKEF.of(optimizer))
    else:
        checkpoint.save(folder, TopKEF.of(optimizer))
    hvd.barrier()
    checkpoint.load(folder, TopKEF.of(optimizer))
    assert_residuals(optimizer, saved)
