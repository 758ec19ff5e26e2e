"""The package's network of simulated ranks, which for tests keeps all that ranks hand over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Generic, TypeVar

from horovod_topk.core.exchange import loopback
from horovod_topk.core.exchange.loopback import Joined, Key, LoopbackCollective
from horovod_topk.core.plan.nodes import Location
from horovod_topk.ops import Ops

Array = TypeVar("Array")
Result = TypeVar("Result")

__all__ = ["Loopback", "LoopbackCollective", "Message", "on_every_rank"]


@dataclass(frozen=True)
class Message(Generic[Array]):
    """What one rank handed to one collective."""

    name: str
    payload: Array  # uint8, a copy


class Loopback(loopback.Loopback[Array]):
    """The wire between `size` ranks.

    `sent[rank]` records all that a rank handed over, `awaited[rank]` the names it waited for.
    """

    def __init__(
        self,
        size: int,
        ops: Ops[Array],
        patience: float = 5.0,
        locations: Sequence[Location] | None = None,
    ) -> None:
        super().__init__(size, ops, patience, locations)
        self.sent: list[list[Message[Array]]] = [[] for _ in range(size)]
        self.awaited: list[list[str]] = [[] for _ in range(size)]

    def post(self, rank: int, name: str, payload: Array) -> Key:
        """Hand over a copy of a payload, and record it."""
        message = Message(name, self.ops.clone(payload))
        self.sent[rank].append(message)
        return super().post(rank, name, message.payload)

    def receive(self, rank: int, key: Key, joined: Joined[Array]) -> Array:
        """Wait as the package's ranks do, record it, and read what is there by now."""
        self.awaited[rank].append(key[0])
        self._arrived.pop(key, None)
        return super().receive(rank, key, joined)

    def forget(self, key: Key) -> None:
        """Keep what was sent."""


def on_every_rank(
    network: Loopback[Array], body: Callable[[LoopbackCollective[Array]], Result]
) -> list[Future[Result]]:
    """Run `body` once a rank, one thread each; a future holds its result or its exception."""
    with ThreadPoolExecutor(network.size) as pool:
        futures = [pool.submit(body, network.collective(r)) for r in range(network.size)]
        wait(futures)
    return futures
