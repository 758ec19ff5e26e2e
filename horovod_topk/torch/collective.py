"""Horovod's collectives as the core wants them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor


@dataclass(frozen=True)
class _Handle:
    """A Horovod collective under way."""

    handle: int

    def wait(self) -> Tensor:
        result: Any = hvd.synchronize(self.handle)
        received: Tensor = result[0] if isinstance(result, tuple) else result
        return received


class HorovodCollective:
    """`horovod_topk.core.exchange.Collective` over a Horovod process set."""

    def __init__(self, process_set: hvd.ProcessSet) -> None:
        self._process_set = process_set

    @property
    def rank(self) -> int:
        """Rank within the process set."""
        return int(self._process_set.rank())

    @property
    def size(self) -> int:
        """Ranks in the process set."""
        return int(self._process_set.size())

    def allgather(self, payload: Tensor, name: str) -> _Handle:
        """Start a named allgather of a uint8 tensor; does not block."""
        return _Handle(hvd.allgather_async(payload, name=name, process_set=self._process_set))

    def alltoall(self, payloads: Tensor, name: str) -> _Handle:
        """Start a named alltoall of equal stretches of a uint8 tensor; does not block."""
        splits = torch.full([self.size], payloads.numel() // self.size, dtype=torch.int32)
        return _Handle(
            hvd.alltoall_async(payloads, splits, name=name, process_set=self._process_set)
        )
