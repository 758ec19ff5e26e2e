"""How payloads cross the network, over one small protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from horovod_topk.core import payload as wire
from horovod_topk.core.plan import BucketPlan, Plan

Array = TypeVar("Array")
Received = TypeVar("Received", covariant=True)


class Pending(Protocol[Received]):
    """A collective under way."""

    def wait(self) -> Received:
        """Block until it is done and return its result."""
        ...


class Collective(Protocol[Array]):
    """A communicator: Horovod's, mpi4py's, or a test's."""

    @property
    def rank(self) -> int:
        """This process among those that exchange, from 0."""
        ...

    @property
    def size(self) -> int:
        """How many exchange."""
        ...

    def allgather(self, payload: Array, name: str) -> Pending[Array]:
        """Start to gather a uint8 array, the same length on every rank, in rank order.

        Must not block. `name` is equal on all ranks, and unique among collectives under way.
        """
        ...


@dataclass(frozen=True)
class Traffic:
    """Bytes of one rank and step."""

    payload_bytes: int  # handed to collectives
    sent_bytes: int  # sent for them
    dense_bytes: int  # sent by a ring allreduce of the dense gradients instead


class Allgather(Generic[Array]):
    """Every rank sends its payload to every other; bytes grow with the number of ranks."""

    def __init__(self, collective: Collective[Array]) -> None:
        self._collective = collective

    @property
    def ranks(self) -> int:
        """How many payloads come back."""
        return self._collective.size

    def launch(self, payload: Array, name: str) -> Pending[Array]:
        """Start the exchange of one bucket."""
        return self._collective.allgather(payload, name)

    def check_length(self, received: int, bucket: BucketPlan) -> None:
        """Refuse a result that is not one payload a rank; raises PayloadError."""
        wire.check_length(received, bucket.layout.payload_bytes, self.ranks, bucket.ordinal)

    def traffic(self, plan: Plan) -> Traffic:
        """Bytes of a step, sent in a ring from rank to rank."""
        payload_bytes = sum(bucket.layout.payload_bytes for bucket in plan.buckets)
        dense = sum(bucket.dense_bytes for bucket in plan.buckets)
        sent = (self.ranks - 1) * payload_bytes
        return Traffic(payload_bytes, sent, ring_allreduce_bytes(dense, self.ranks))


def ring_allreduce_bytes(dense_bytes: int, ranks: int) -> int:
    """Bytes a rank sends in a ring allreduce: 2 (P - 1) / P of the data (Patarasuk, Yuan 2009)."""
    return 2 * (ranks - 1) * dense_bytes // ranks
