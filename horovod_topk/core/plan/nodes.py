"""Which ranks share a node, computed by every rank from all ranks' host names and local ranks."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Location:
    """The host and local rank of a rank, as it reports them."""

    host: str  # the machine's own name
    local_rank: int  # among the ranks that the launcher put on one host; from 0
    first: int  # first rank of these, if they are consecutive: rank - local rank


def here(rank: int, local_rank: int) -> Location:
    """The location of this process.

    rank: rank among all; local_rank: rank among those that the launcher put on this host.
    """
    return Location(socket.gethostname(), local_rank, rank - local_rank)


@dataclass(frozen=True)
class Nodes:
    """The ranks of each node, ascending; nodes in the order of their first ranks."""

    ranks: tuple[tuple[int, ...], ...]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Ranks on each node."""
        return tuple(map(len, self.ranks))

    @cached_property
    def kinds(self) -> tuple[tuple[int, ...], ...]:
        """A node of each kind: the others of its kind send as much in every exchange.

        They have as many ranks, of which the same ones come before a rank of another node.
        """
        spots, count = self._spots, sum(self.sizes)
        found: dict[tuple[bool, ...], tuple[int, ...]] = {}
        for place, node in enumerate(self.ranks):
            leaves = tuple(spots[(rank + 1) % count][0] != place for rank in node)
            found.setdefault(leaves, node)
        return tuple(found.values())

    @cached_property
    def owners(self) -> int:
        """Owners of shards on every node: as many as the smallest node has ranks."""
        return min(self.sizes)

    @property
    def cross_groups(self) -> tuple[tuple[int, ...], ...]:
        """The owners of the same shards, one rank of each node, for each position; ascending."""
        return tuple(tuple(sorted(node[i] for node in self.ranks)) for i in range(self.owners))

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """All groups of more than one rank that exchange: nodes and cross groups."""
        return tuple(group for group in (*self.ranks, *self.cross_groups) if len(group) > 1)

    def of(self, rank: int) -> tuple[int, ...]:
        """The ranks on the node of a rank."""
        return self.ranks[self._spots[rank][0]]

    def position(self, rank: int) -> int:
        """A rank's position on its node, from 0."""
        return self._spots[rank][1]

    @cached_property
    def _spots(self) -> dict[int, tuple[int, int]]:
        """The node of each rank, and the rank's position on it."""
        numbered = enumerate(self.ranks)
        return {rank: (n, i) for n, node in numbered for i, rank in enumerate(node)}


def nodes_of(locations: Sequence[Location]) -> Nodes:
    """Group ranks into nodes, given each rank's location in rank order.

    Ranks with the same host name share a node. If two ranks of a host have the same local rank,
    several machines share a name, or a launcher counts one machine as several: then ranks with
    the same first rank share a node.
    """
    spots = [(each.host, each.local_rank) for each in locations]
    named = len(set(spots)) == len(spots)
    found: dict[int | str, list[int]] = {}
    for rank, each in enumerate(locations):
        found.setdefault(each.host if named else each.first, []).append(rank)
    return Nodes(tuple(map(tuple, found.values())))
