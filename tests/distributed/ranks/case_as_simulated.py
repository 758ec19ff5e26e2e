"""Every method and exchange in PyTorch, beside simulated ranks: see ../simulated.py."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import training
from horovod_topk.core.control import allocation
from horovod_topk.core.plan.nodes import Location
from horovod_topk.torch_training.gradients import local
from simulated import ROWS, SHAPES, Row, assert_as_simulated
from training import Setup, Task
from world import TopKEF, adapter, hvd, place


class Given(Task):
    """A loss whose gradients are given."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(shape) for shape in SHAPES)
        self.given: list[Tensor] = []

    def loss(self, rank: int, step: int) -> Tensor:
        pairs = zip(self.weights, self.given, strict=True)
        return torch.stack([(weight * gradient).sum() for weight, gradient in pairs]).sum()


class Trained:
    """`simulated.Harness` in PyTorch, over Horovod or DistributedDataParallel."""

    def __init__(self, row: Row, name: str) -> None:
        self.compression = getattr(adapter, row.method)(**row.settings)
        setup = Setup(build=Given, optimizer=training.plain_sgd)
        self._task: Any = setup.task()
        self._optimizer = setup.distributed(self._task, self.compression)
        self.names = [name for name, _ in self._task.named_parameters()]
        self.plan = TopKEF.of(self._optimizer).agreed

    def exchange(self, gradients: Sequence[Any]) -> list[Any]:
        self._task.given = [torch.from_numpy(each) for each in gradients]
        self._optimizer.zero_grad()
        self._task.loss(hvd.rank(), 0).backward()
        self._optimizer.synchronize()
        exchanged = [local(p.grad).clone().numpy() for p in self._task.parameters()]
        if all(torch.from_numpy(each).isfinite().all() for each in exchanged):
            with self._optimizer.skip_synchronize():
                self._optimizer.step()
        else:
            self._optimizer.zero_grad()
        return exchanged


@pytest.mark.one_in(3)
@pytest.mark.everywhere(one_in=5)
@pytest.mark.world_size(2, 3, 4)
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_each_step_is_that_of_simulated_ranks(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, "FIRST", 1)  # allocations after 1, 2, 4 committed steps
    place(monkeypatch, Location("host", 0, int(hvd.rank() >= -(-hvd.size() // 2))))
    assert_as_simulated(partial(Trained, row), row, hvd.rank(), hvd.size())
