"""mpi4py as a collective: the core under plain `mpirun`, without Horovod.

    from mpi4py import MPI
    from horovod_topk.mpi import MpiCollective

    exchange = Allgather(MpiCollective(MPI.COMM_WORLD))

Its use is to check the adapters against something that shares no code with Horovod. Arrays are
NumPy's; needs the extra `horovod-topk[mpi]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class _Request:
    """A non-blocking collective; keeps its buffers alive until it is done."""

    request: MPI.Request
    payload: Array
    gathered: Array

    def wait(self) -> Array:
        self.request.Wait()
        return self.gathered


class MpiCollective:
    """`horovod_topk.core.exchange.Collective` over an MPI communicator.

    Collectives pair by the order in which they start, so ranks must launch buckets in one order.
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

    def allgather(self, payload: Array, name: str) -> _Request:
        """Start a non-blocking allgather of a uint8 array; `name` is not needed by MPI."""
        gathered = np.empty(payload.size * self.size, np.uint8)
        request = self._communicator.Iallgather([payload, MPI.BYTE], [gathered, MPI.BYTE])
        return _Request(request, payload, gathered)

    def alltoall(self, payloads: Array, name: str) -> _Request:
        """Start a non-blocking alltoall of equal stretches; `name` is not needed by MPI."""
        received = np.empty(payloads.size, np.uint8)
        request = self._communicator.Ialltoall([payloads, MPI.BYTE], [received, MPI.BYTE])
        return _Request(request, payloads, received)
