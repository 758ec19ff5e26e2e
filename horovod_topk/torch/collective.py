"""Horovod's collectives as the core wants them."""

from __future__ import annotations

from dataclasses import dataclass

import horovod.torch as hvd
from torch import Tensor


@dataclass(frozen=True)
class _Handle:
    """A Horovod collective under way."""

    handle: int

    def wait(self) -> Tensor:
        result: Tensor = hvd.synchronize(self.handle)
        return result


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
