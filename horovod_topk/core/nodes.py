"""Which ranks share a node, derived alike on every rank from where each says that it runs."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Location:
    """Where a rank runs, as it knows it."""

    host: str  # the machine's own name
    local_rank: int  # among the ranks that the launcher put together; from 0
    first: int  # of these, if they follow each other: rank - local rank


def here(rank: int, local_rank: int) -> Location:
    """This process's location.

    rank: among all; local_rank: among those that the launcher put together.
    """
    return Location(socket.gethostname(), local_rank, rank - local_rank)


@dataclass(frozen=True)
class Nodes:
    """The ranks of each node, ascending; nodes in the order of their first ranks."""

    ranks: tuple[tuple[int, ...], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Ranks on each node."""
        return tuple(map(len, self.ranks))

    @property
    def owners(self) -> int:
        """Ranks of every node that own shards: as many as the smallest node has."""
        return min(self.sizes)

    @property
    def cross_groups(self) -> tuple[tuple[int, ...], ...]:
        """Owners of the same shards, one of each node, by their position on it; ascending."""
        return tuple(tuple(sorted(node[i] for node in self.ranks)) for i in range(self.owners))

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Nodes and cross_groups of more than one rank: who exchanges with whom."""
        return tuple(group for group in (*self.ranks, *self.cross_groups) if len(group) > 1)

    def of(self, rank: int) -> tuple[int, ...]:
        """The ranks of a rank's node."""
        return self.ranks[self._spots[rank][0]]

    def position(self, rank: int) -> int:
        """A rank's position on its node, from 0."""
        return self._spots[rank][1]

    @cached_property
    def _spots(self) -> dict[int, tuple[int, int]]:
        """Of each rank its node, and its position there."""
        numbered = enumerate(self.ranks)
        return {rank: (n, i) for n, node in numbered for i, rank in enumerate(node)}


def nodes_of(locations: Sequence[Location]) -> Nodes:
    """Nodes from each rank's location, in rank order.

    Hosts tell, in whatever order their ranks come. Where two ranks of a host have one local rank,
    several machines share a name, or a launcher took one for several: then first ranks tell.
    """
    spots = [(each.host, each.local_rank) for each in locations]
    named = len(set(spots)) == len(spots)
    found: dict[int | str, list[int]] = {}
    for rank, each in enumerate(locations):
        found.setdefault(each.host if named else each.first, []).append(rank)
    return Nodes(tuple(map(tuple, found.values())))
