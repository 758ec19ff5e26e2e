"""DistributedDataParallel with one rank, which has nobody to exchange with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from horovod_topk.ddp import TopKEF


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Any]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    torch.manual_seed(0)
    yield DistributedDataParallel(nn.Linear(20, 30))
    dist.destroy_process_group()


def test_one_rank_compresses_nothing_and_steps_as_without(model: Any) -> None:
    alone = nn.Linear(20, 30)
    alone.load_state_dict(model.module.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    TopKEF(clip_norm=0.5).attach(model, optimizer)
    for _ in range(3):
        x = torch.randn(8, 20)
        for net, own in ((model, optimizer), (alone, plain)):
            own.zero_grad()
            net(x).square().sum().backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        optimizer.step()
        plain.step()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    stats = TopKEF.of(model).stats()
    assert not stats.active and "world size 1" in stats.skipped["*"]
    assert TopKEF.of(model).state_dict() == {}
    TopKEF().attach(model, torch.optim.AdamW(model.parameters()))  # in the place of the first
    assert not TopKEF.of(model).active


def test_one_rank_steps_several_optimizers_as_without(model: Any) -> None:
    alone = nn.Linear(20, 30)
    alone.load_state_dict(model.module.state_dict())

    def optimizers(net: Any) -> list[Any]:
        sgd = torch.optim.SGD([net.weight], lr=0.1, momentum=0.9)
        return [sgd, torch.optim.AdamW([net.bias])]

    ours, plain = optimizers(model.module), optimizers(alone)
    TopKEF().attach(model, ours)
    for _ in range(3):
        x = torch.randn(8, 20)
        for net, own in ((model, ours), (alone, plain)):
            net.zero_grad()
            net(x).square().sum().backward()
            for each in own:
                each.step()
    assert torch.equal(model.module.weight, alone.weight)
    assert torch.equal(model.module.bias, alone.bias)
    assert not TopKEF.of(model).stats().active and TopKEF.of(model).state_dict() == {}
