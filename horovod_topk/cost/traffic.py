"""What exchanges would send, asked of the exchanges themselves, without a network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from horovod_topk.core.choice import make_exchange
from horovod_topk.core.exchange import Collective, Exchange, Pending
from horovod_topk.core.nodes import Location, Nodes


@dataclass(frozen=True)
class Nobody:
    """A collective of so many ranks that carries nothing."""

    size: int
    rank: int = 0

    def allgather(
        self, payload: bytes, name: str, counts: Sequence[int] | None = None
    ) -> Pending[bytes]:
        """Refuses."""
        raise TypeError("nothing is sent for a plan")

    alltoall = allgather

    @property
    def location(self) -> Location:
        """Nowhere."""
        return Location("", self.rank, 0)

    def reduce_scatter(self, array: bytes, counts: Sequence[int], name: str) -> Pending[bytes]:
        """Refuses."""
        raise TypeError("nothing is sent for a plan")

    def can_split(self, groups: Sequence[Sequence[int]]) -> bool:
        """As if process sets were dynamic."""
        return True

    def split(self, groups: Sequence[Sequence[int]]) -> Sequence[Collective[bytes] | None]:
        """Nobody is in any."""
        return [None] * len(groups)


def nodes_of(ranks: int, local_size: int) -> Nodes:
    """Nodes of so many ranks each, the last of what is left."""
    starts = range(0, ranks, local_size)
    return Nodes(tuple(tuple(range(at, min(at + local_size, ranks))) for at in starts))


def exchange_of(kind: str, nodes: Nodes) -> Exchange[bytes]:
    """One to ask what it would send."""
    collective: Collective[bytes] = Nobody(sum(nodes.sizes))
    return make_exchange(kind, collective, nodes)
