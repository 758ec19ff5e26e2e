"""A network of ranks within one process: `Collective` for tests.

Collectives pair by name, and by how often a rank has used that name: as in Horovod, the order in
which ranks start them means nothing. `wait` works in lock-step (everybody starts, then everybody
waits) and, for code that starts and waits at once, with one thread a rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from horovod_topk.core.plan.nodes import Location
from horovod_topk.core.plan.payload import check_counts
from horovod_topk.ops import Ops

Array = TypeVar("Array")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Message(Generic[Array]):
    """What one rank handed to one collective."""

    name: str
    payload: Array  # uint8, a copy


class Loopback(Generic[Array]):
    """The wire between `size` ranks.

    `sent[rank]` records all that a rank handed over, `awaited[rank]` the names it waited for.
    `locations[rank]` is where it runs: each on a node of its own, unless told otherwise.
    """

    def __init__(
        self,
        size: int,
        ops: Ops[Array],
        patience: float = 5.0,
        locations: Sequence[Location] | None = None,
    ) -> None:
        self.size = size
        self.locations = locations or [Location("host", 0, rank) for rank in range(size)]
        self.groups: dict[tuple[int, ...], Loopback[Array]] = {}  # networks of some ranks
        self.sent: list[list[Message[Array]]] = [[] for _ in range(size)]
        self.awaited: list[list[str]] = [[] for _ in range(size)]
        self._ops = ops
        self._patience = patience  # seconds a rank waits for the others
        self._posted: dict[tuple[str, int], dict[int, Array]] = {}
        self._changed = threading.Condition()

    def group(self, ranks: tuple[int, ...]) -> Loopback[Array]:
        """The network of some of the ranks."""
        with self._changed:
            if ranks not in self.groups:
                self.groups[ranks] = Loopback(len(ranks), self._ops, self._patience)
            return self.groups[ranks]

    def collective(self, rank: int) -> LoopbackCollective[Array]:
        """The network as one rank sees it."""
        return LoopbackCollective(self, rank)

    def post(self, rank: int, name: str, payload: Array) -> tuple[str, int]:
        """Hand over a payload; returns which collective it belongs to."""
        with self._changed:
            key = (name, sum(message.name == name for message in self.sent[rank]))
            message = Message(name, self._ops.clone(payload))
            self.sent[rank].append(message)
            self._posted.setdefault(key, {})[rank] = message.payload
            self._changed.notify_all()
        return key

    def collect(self, rank: int, key: tuple[str, int]) -> list[Array]:
        """Every rank's payload of one collective, in rank order; `rank` waits for it.

        Raises:
            TimeoutError: a rank never took part.
        """
        with self._changed:
            self.awaited[rank].append(key[0])
            posted = self._posted[key]
            if not self._changed.wait_for(lambda: len(posted) == self.size, self._patience):
                raise TimeoutError(f"{key}: only ranks {sorted(posted)} of {self.size} came")
        return [posted[each] for each in range(self.size)]

    def gather(self, rank: int, key: tuple[str, int]) -> Array:
        """The payloads of one collective behind each other."""
        return self._join(self.collect(rank, key))

    def exchange(self, rank: int, key: tuple[str, int]) -> Array:
        """The stretches of them that are meant for `rank`, behind each other."""
        ops, parts = self._ops, []
        for payloads in self.collect(rank, key):
            size = ops.numel(payloads) // self.size
            parts.append(ops.view(payloads, rank * size, (rank + 1) * size))
        return self._join(parts)

    def reduce(self, rank: int, key: tuple[str, int], counts: Sequence[int]) -> Array:
        """A stretch of the sum of them, added in rank order."""
        ops, start = self._ops, sum(counts[:rank])
        arrays = self.collect(rank, key)
        check_counts([ops.numel(array) for array in arrays], sum(counts), key[0])
        total, *others = arrays
        total = ops.clone(ops.view(total, start, start + counts[rank]))
        for other in others:
            ops.compensate(total, ops.view(other, start, start + counts[rank]), total)
        return total

    def add_up(self, rank: int, key: tuple[str, int]) -> Array:
        """The sum of them, added in rank order."""
        total, *others = self.collect(rank, key)
        total = self._ops.clone(total)
        for other in others:
            self._ops.compensate(total, other, total)
        return total

    def _join(self, payloads: list[Array]) -> Array:
        ops, at = self._ops, 0
        gathered = ops.zeros(sum(map(ops.numel, payloads)), "uint8", "cpu")
        for payload in payloads:
            ops.assign(ops.view(gathered, at, at + ops.numel(payload)), payload)
            at += ops.numel(payload)
        return gathered


@dataclass(frozen=True)
class LoopbackPending(Generic[Array]):
    """A collective under way."""

    result: Callable[[], Array]

    def wait(self) -> Array:
        """What comes of it for this rank."""
        return self.result()


@dataclass(frozen=True)
class LoopbackCollective(Generic[Array]):
    """`core.exchange.Collective` of one rank."""

    network: Loopback[Array]
    rank: int

    @property
    def size(self) -> int:
        """How many exchange."""
        return self.network.size

    @property
    def location(self) -> Location:
        """Where it runs."""
        return self.network.locations[self.rank]

    def allgather(
        self, payload: Array, name: str, counts: Sequence[int] | None = None
    ) -> LoopbackPending[Array]:
        """Start a collective; does not block."""
        return self._pending(self.network.gather, payload, name)

    def alltoall(self, payloads: Array, name: str) -> LoopbackPending[Array]:
        """Start a collective; does not block."""
        return self._pending(self.network.exchange, payloads, name)

    def reduce_scatter(
        self, array: Array, counts: Sequence[int], name: str
    ) -> LoopbackPending[Array]:
        """Start a collective; does not block."""
        return self._pending(self.network.reduce, array, name, counts)

    def allreduce(self, array: Array, name: str) -> LoopbackPending[Array]:
        """Start a collective; does not block."""
        return self._pending(self.network.add_up, array, name)

    def can_split(self, groups: Sequence[Sequence[int]]) -> bool:
        """Always."""
        return True

    def split(self, groups: Sequence[Sequence[int]]) -> list[LoopbackCollective[Array] | None]:
        """Collectives over networks of some of the ranks."""
        return [
            self.network.group(tuple(group)).collective(group.index(self.rank))
            if self.rank in group
            else None
            for group in groups
        ]

    def _pending(
        self, result: Callable[..., Array], payload: Array, name: str, *args: object
    ) -> LoopbackPending[Array]:
        key = self.network.post(self.rank, name, payload)
        return LoopbackPending(partial(result, self.rank, key, *args))


def on_every_rank(
    network: Loopback[Array], body: Callable[[LoopbackCollective[Array]], Result]
) -> list[Future[Result]]:
    """Run `body` once a rank, one thread each; a future holds its result or its exception."""
    with ThreadPoolExecutor(network.size) as pool:
        futures = [pool.submit(body, network.collective(r)) for r in range(network.size)]
        wait(futures)
    return futures
