"""mpi4py as a collective: runs the core with plain `mpirun`, without Horovod.

Adapters are checked against it, as it shares no code with Horovod. Arrays are NumPy's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from horovod_topk.core.exchange.protocol import ordered_sum
from horovod_topk.core.plan.nodes import Location

Array = NDArray[Any]


@dataclass(frozen=True)
class _Request:
    """A non-blocking collective; keeps its buffers alive until it is done."""

    request: MPI.Request
    payload: Array
    received: Array
    is_summed: bool = False  # whether `wait()` adds up the rows of what was received

    def wait(self) -> Array:
        self.request.Wait()
        rows = self.received
        total: Array = ordered_sum(rows, len(rows)) if self.is_summed else rows
        return total


class MpiCollective:
    """`core.exchange.Collective` over an MPI communicator.

    MPI matches collectives by the order in which they start, so all ranks must launch buckets in
    the same order.
    """

    def __init__(self, communicator: MPI.Comm) -> None:
        self._communicator = communicator

    @property
    def rank(self) -> int:
        """Rank within the communicator."""
        return self._communicator.Get_rank()

    @property
    def size(self) -> int:
        """Ranks in the communicator."""
        return self._communicator.Get_size()

    @property
    def location(self) -> Location:
        """The host of this rank; its rank in the communicator serves as the local rank."""
        return Location(MPI.Get_processor_name(), self.rank, 0)

    def allgather(self, payload: Array, name: str, counts: Sequence[int] | None = None) -> _Request:
        """Start a non-blocking allgather of a uint8 array; `name` is not needed by MPI."""
        sizes = [payload.size] * self.size if counts is None else list(counts)
        gathered = np.empty(sum(sizes), np.uint8)
        received = [gathered, sizes, MPI.BYTE]
        request = self._communicator.Iallgatherv([payload, MPI.BYTE], received)
        return _Request(request, payload, gathered)

    def alltoall(self, payloads: Array, name: str) -> _Request:
        """Start a non-blocking alltoall of equal stretches; `name` is not needed by MPI."""
        received = np.empty(payloads.size, np.uint8)
        request = self._communicator.Ialltoall([payloads, MPI.BYTE], [received, MPI.BYTE])
        return _Request(request, payloads, received)

    def reduce_scatter(self, array: Array, counts: Sequence[int], name: str) -> _Request:
        """Start a non-blocking alltoall whose parts `wait()` adds in rank order."""
        mine = counts[self.rank]
        received = np.empty((self.size, mine), array.dtype)
        request = self._communicator.Ialltoallv([array, counts], [received, [mine] * self.size])
        return _Request(request, array, received, is_summed=True)

    def can_split(self, groups: Sequence[Sequence[int]]) -> bool:
        """Return True."""
        return True

    def split(self, groups: Sequence[Sequence[int]]) -> list[MpiCollective | None]:
        """Make communicators of these groups."""
        found: list[MpiCollective | None] = []
        for group in groups:
            color = 0 if self.rank in group else MPI.UNDEFINED
            part = self._communicator.Split(color, self.rank)
            found.append(None if part == MPI.COMM_NULL else MpiCollective(part))
        return found
