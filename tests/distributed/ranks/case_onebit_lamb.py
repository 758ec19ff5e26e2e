"""OneBitLamb on real ranks, with Horovod and with DistributedDataParallel.

case_onebit_adam.py tests what it shares with OneBitAdam.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from horovod_topk import checkpoint
from published import FREEZE, SMALL, PublishedLamb
from training import Setup, ordinary
from witness import assert_ranks_equal, bits
from world import TopKEF, adapter, hvd

pytestmark = pytest.mark.everywhere

COMPRESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "signs": ("SignSGD", {"exchange": "sharded"}),
    "top-k": ("TopKEF", {"ratio": 0.1, "values": "int4"}),
}


def start(name: str = "signs") -> tuple[Any, Any]:
    method, settings = COMPRESSORS[name]
    setup = Setup(optimizer=lambda groups: adapter.OneBitLamb(groups, FREEZE, lr=0.05, eps=1e-8))
    task = setup.task()
    compression = getattr(adapter, method)(min_numel=SMALL, **settings)
    return task, setup.distributed(task, compression)


@pytest.mark.world_size(2, 3)
def test_its_updates_are_the_published_ones() -> None:
    (task, optimizer), published = start(), PublishedLamb(Setup().task())
    for step in range(12):
        ordinary(task, optimizer, step)
        published.step(0.05)
        for (name, mine), there in zip(
            task.named_parameters(), published.task.parameters(), strict=True
        ):
            torch.testing.assert_close(mine, there, rtol=1e-4, atol=1e-5, msg=f"{step} {name}")
            state = optimizer.state[mine]
            assert state["factor"] == pytest.approx(published.r[name] * (step >= FREEZE), rel=1e-3)
        assert_ranks_equal(task.parameters())
    assert any(factor != 1.0 for factor in published.r.values())


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("name", COMPRESSORS)
def test_a_run_goes_on_from_a_checkpoint_to_the_bit(name: str, tmp_path: Path) -> None:
    folder = hvd.broadcast_object(tmp_path, root_rank=0, name="folder")
    (task, optimizer), (again, other) = start(name), start(name)
    for step in range(6):
        ordinary(task, optimizer, step)
    checkpoint.save(folder, TopKEF.of(optimizer))
    again.load_state_dict(task.state_dict())
    other.load_state_dict(deepcopy(optimizer.state_dict()))
    hvd.barrier()
    checkpoint.load(folder, TopKEF.of(other))
    for step in range(6, 10):
        ordinary(task, optimizer, step)
        ordinary(again, other, step)
    assert torch.equal(bits(again.parameters()), bits(task.parameters()))
    assert_ranks_equal(task.parameters())
