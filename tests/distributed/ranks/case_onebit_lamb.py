"""OneBitLamb on real ranks, with Horovod and with DistributedDataParallel.

case_onebit_adam.py tests what it shares with OneBitAdam.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from resuming import assert_resumes
from training import Setup, ordinary
from witness import assert_ranks_equal
from world import adapter, hvd

pytestmark = pytest.mark.everywhere

COMPRESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "signs": ("SignSGD", {"exchange": "sharded"}),
    "top-k": ("TopKEF", {"ratio": 0.1, "values": "int4"}),
    "all": ("TopKEF", {"ratio": 1.0, "values": "float32"}),
}
FREEZE = 3
SMALL = 16  # elements; smaller tensors travel whole


def start(name: str = "signs") -> tuple[Any, Any]:
    method, settings = COMPRESSORS[name]
    setup = Setup(optimizer=lambda groups: adapter.OneBitLamb(groups, FREEZE, lr=0.05, eps=1e-8))
    task = setup.task()
    compression = getattr(adapter, method)(min_numel=SMALL, **settings)
    return task, setup.distributed(task, compression)


@pytest.mark.world_size(2, 3)
def test_where_all_is_sent_it_steps_on_the_mean_gradients() -> None:
    """As it does by itself, which tests/unit/test_onebit_lamb.py compares with the paper."""
    (task, optimizer), twin = start("all"), Setup().task()
    alone = adapter.OneBitLamb(twin.parameters(), FREEZE, lr=0.05, eps=1e-8)
    for step in range(12):
        ordinary(task, optimizer, step)
        twin.zero_grad()
        twin.loss(hvd.rank(), step).backward()
        for name, p in twin.named_parameters():
            p.grad = hvd.allreduce(p.grad, name=f"mean.{name}")
        alone.step()
        for mine, its in zip(task.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)
            factors = [each["factor"] for each in (optimizer.state[mine], alone.state[its])]
            assert factors[0] == pytest.approx(factors[1], rel=1e-3)
        assert_ranks_equal(task.parameters())


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("name", ["signs", "top-k"])
def test_a_run_goes_on_from_a_checkpoint_to_the_bit(name: str, tmp_path: Path) -> None:
    assert_resumes(lambda: start(name), tmp_path)
