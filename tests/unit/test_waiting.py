"""PyTorch's ranks wait for a collective without taking the core that it needs."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from horovod_topk.core.run.timing import StepTimer
from horovod_topk.errors import TensorTooLargeError
from horovod_topk.torch import collective


class Slow:
    """Horovod, with a collective that is done at the third look."""

    def __init__(self) -> None:
        self.looks = 0
        self.done: list[tuple[int, int]] = []

    def poll(self, handle: int) -> bool:
        self.looks += 1
        return self.looks == 3

    def synchronize(self, handle: int) -> str:
        self.done.append((handle, self.looks))
        return "result"


def test_a_rank_sleeps_between_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow()
    pauses: list[float] = []
    monkeypatch.setattr(collective, "hvd", slow)
    clock = SimpleNamespace(sleep=pauses.append, perf_counter=time.perf_counter)
    monkeypatch.setattr(collective, "time", clock)
    assert collective._Handle(7, StepTimer()).wait() == "result"
    assert slow.done == [(7, 3)]
    assert len(pauses) == 2
    assert all(0 < pause <= 1e-3 for pause in pauses)


def test_an_allgather_that_horovod_cannot_count_is_refused() -> None:
    """Its displacements are int32: it would write to wrong addresses."""
    ranks = SimpleNamespace(size=lambda: 4, rank=lambda: 0)
    payload = torch.empty(2**29, dtype=torch.uint8, device="meta")
    with pytest.raises(TensorTooLargeError, match="2147483648 bytes in the allgather w"):
        collective.HorovodCollective(ranks).allgather(payload, "w")
