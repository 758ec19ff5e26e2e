"""Collectives between the simulated ranks of one process.

Collectives pair by name, and by how often a rank has used that name, as in Horovod: the order in
which ranks start them means nothing. Ranks may run in lock-step, where all start a collective
before the first waits for it, or in one thread each.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from horovod_topk.core.plan.nodes import Location
from horovod_topk.core.plan.payload import check_counts
from horovod_topk.ops import Ops

Array = TypeVar("Array")
Key = tuple[str, int]  # a collective: its name, and how often the name was used before
Joined = Callable[[list[Array]], list[Array]]  # every rank's input -> every rank's output


class Loopback(Generic[Array]):
    """The network between `size` ranks.

    Args:
        patience: seconds that a rank waits for others, if each has its thread.
        locations: location of each rank; None: each is on a node of its own.
    """

    def __init__(
        self,
        size: int,
        ops: Ops[Array],
        patience: float = 0.0,
        locations: Sequence[Location] | None = None,
    ) -> None:
        self.size, self.ops, self.patience, self.locations = size, ops, patience, locations
        self.groups: dict[tuple[int, ...], Loopback[Array]] = {}  # networks of some ranks
        self._posted: dict[Key, dict[int, Array]] = {}
        self._arrived: dict[Key, list[Array]] = {}
        self._used, self._received = Counter[tuple[int, str]](), Counter[Key]()
        self._changed = threading.Condition()

    def collective(self, rank: int) -> LoopbackCollective[Array]:
        """The network as one rank sees it."""
        return LoopbackCollective(self, rank)

    def group(self, ranks: tuple[int, ...]) -> Loopback[Array]:
        """The network of some of the ranks."""
        with self._changed:
            if ranks not in self.groups:
                self.groups[ranks] = type(self)(len(ranks), self.ops, self.patience)
            return self.groups[ranks]

    def post(self, rank: int, name: str, payload: Array) -> Key:
        """Post a rank's data to a collective, and return the collective's number."""
        with self._changed:
            key = name, self._used[rank, name]
            self._used[rank, name] += 1
            self._posted.setdefault(key, {})[rank] = payload
            self._changed.notify_all()
        return key

    def receive(self, rank: int, key: Key, joined: Joined[Array]) -> Array:
        """The data that a rank receives from a collective."""
        with self._changed:
            posted = self._posted[key]
            if not self._changed.wait_for(lambda: len(posted) == self.size, self.patience):
                raise TimeoutError(
                    f"{key}: only ranks {sorted(posted)} of {self.size} have started it"
                )
            if key not in self._arrived:
                self._arrived[key] = joined([posted[each] for each in range(self.size)])
            received = self._arrived[key][rank]
            self._received[key] += 1
            if self._received[key] == self.size:
                self.forget(key)
        return received

    def forget(self, key: Key) -> None:
        """Free the data of a collective that all ranks have received."""
        del self._posted[key], self._arrived[key], self._received[key]


@dataclass(frozen=True)
class LoopbackPending(Generic[Array]):
    """A started collective."""

    result: Callable[[], Array]

    def wait(self) -> Array:
        """The data that this rank receives."""
        return self.result()


@dataclass(frozen=True)
class LoopbackCollective(Generic[Array]):
    """`Collective` of one simulated rank."""

    network: Loopback[Array]
    rank: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.network.size

    @property
    def location(self) -> Location:
        """The location of this rank."""
        locations = self.network.locations
        return Location("host", 0, self.rank) if locations is None else locations[self.rank]

    def allgather(
        self, payload: Array, name: str, counts: Sequence[int] | None = None
    ) -> LoopbackPending[Array]:
        """`Collective.allgather`."""
        return self._start(payload, name, self._to_all)

    def alltoall(self, payloads: Array, name: str) -> LoopbackPending[Array]:
        """`Collective.alltoall`."""
        return self._start(payloads, name, self._to_each)

    def reduce_scatter(
        self, array: Array, counts: Sequence[int], name: str
    ) -> LoopbackPending[Array]:
        """`Collective.reduce_scatter`."""
        return self._start(array, name, partial(self._sum_to_each, name, counts))

    def allreduce(self, array: Array, name: str) -> LoopbackPending[Array]:
        """`Collective.allreduce`, in rank order."""
        return self._start(array, name, self._sum_to_all)

    def can_split(self, groups: Sequence[Sequence[int]]) -> bool:
        """Return True."""
        return True

    def split(self, groups: Sequence[Sequence[int]]) -> list[LoopbackCollective[Array] | None]:
        """`Collective.split`: networks of some of the ranks."""
        return [
            self.network.group(tuple(group)).collective(group.index(self.rank))
            if self.rank in group
            else None
            for group in groups
        ]

    def _start(self, payload: Array, name: str, joined: Joined[Array]) -> LoopbackPending[Array]:
        key = self.network.post(self.rank, name, payload)
        return LoopbackPending(partial(self.network.receive, self.rank, key, joined))

    def _to_all(self, payloads: list[Array]) -> list[Array]:
        return [self.network.ops.joined(payloads)] * self.size

    def _to_each(self, payloads: list[Array]) -> list[Array]:
        ops, ranks = self.network.ops, range(self.size)
        sizes = [ops.numel(each) // self.size for each in payloads]
        sent = list(zip(payloads, sizes, strict=True))
        return [ops.joined([ops.view(p, to * n, (to + 1) * n) for p, n in sent]) for to in ranks]

    def _sum_to_each(self, name: str, counts: Sequence[int], arrays: list[Array]) -> list[Array]:
        ops, total = self.network.ops, sum(counts)
        check_counts([ops.numel(array) for array in arrays], total, name)
        summed, ends = self._sum(arrays), [sum(counts[: i + 1]) for i in range(len(counts))]
        return [ops.view(summed, end - n, end) for end, n in zip(ends, counts, strict=True)]

    def _sum_to_all(self, arrays: list[Array]) -> list[Array]:
        total = self._sum(arrays)
        return [total, *(self.network.ops.clone(total) for _ in range(1, self.size))]

    def _sum(self, arrays: list[Array]) -> Array:
        """The sum in rank order."""
        ops, (first, *others) = self.network.ops, arrays
        total = ops.clone(first)
        for other in others:
            ops.compensate(total, other, total)
        return total
