"""A network of ranks within one process: `Collective` for tests.

Collectives pair by name, and by how often a rank has used that name: as in Horovod, the order in
which ranks start them means nothing. `wait` works in lock-step (everybody starts, then everybody
waits) and, for code that starts and waits at once, with one thread a rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Generic, TypeVar

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
    """

    def __init__(self, size: int, ops: Ops[Array], patience: float = 5.0) -> None:
        self.size = size
        self.sent: list[list[Message[Array]]] = [[] for _ in range(size)]
        self.awaited: list[list[str]] = [[] for _ in range(size)]
        self._ops = ops
        self._patience = patience  # seconds a rank waits for the others
        self._posted: dict[tuple[str, int], dict[int, Array]] = {}
        self._changed = threading.Condition()

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

    def gather(self, rank: int, key: tuple[str, int], *, own_part: bool = False) -> Array:
        """Every rank's payload of one collective, in rank order; `rank` waits for it.

        own_part: only the stretch of each that is meant for `rank`.

        Raises:
            TimeoutError: a rank never took part.
        """
        with self._changed:
            self.awaited[rank].append(key[0])
            posted = self._posted[key]
            if not self._changed.wait_for(lambda: len(posted) == self.size, self._patience):
                raise TimeoutError(f"{key}: only ranks {sorted(posted)} of {self.size} came")
        payloads = [posted[each] for each in range(self.size)]
        return self._join([self._part(p, rank) for p in payloads] if own_part else payloads)

    def _part(self, payloads: Array, rank: int) -> Array:
        size = self._ops.numel(payloads) // self.size
        return self._ops.view(payloads, rank * size, (rank + 1) * size)

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

    network: Loopback[Array]
    rank: int
    key: tuple[str, int]
    own_part: bool = False

    def wait(self) -> Array:
        """Every rank's payload, in rank order."""
        return self.network.gather(self.rank, self.key, own_part=self.own_part)


@dataclass(frozen=True)
class LoopbackCollective(Generic[Array]):
    """`horovod_topk.core.exchange.Collective` of one rank."""

    network: Loopback[Array]
    rank: int

    @property
    def size(self) -> int:
        """How many exchange."""
        return self.network.size

    def allgather(self, payload: Array, name: str) -> LoopbackPending[Array]:
        """Start a collective; does not block."""
        key = self.network.post(self.rank, name, payload)
        return LoopbackPending(self.network, self.rank, key)

    def alltoall(self, payloads: Array, name: str) -> LoopbackPending[Array]:
        """Start a collective; does not block."""
        key = self.network.post(self.rank, name, payloads)
        return LoopbackPending(self.network, self.rank, key, own_part=True)


def on_every_rank(
    network: Loopback[Array], body: Callable[[LoopbackCollective[Array]], Result]
) -> list[Future[Result]]:
    """Run `body` once a rank, one thread each; a future holds its result or its exception."""
    with ThreadPoolExecutor(network.size) as pool:
        futures = [pool.submit(body, network.collective(r)) for r in range(network.size)]
        wait(futures)
    return futures
