"""Simulated ranks of an elastic job, which come, leave and are lost; each has a real manager."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

PATIENCE = 60.0  # seconds


class Member:
    """A rank as its manager's talk: all ranks say something, and hear what the others have said."""

    manager: Any
    place: int
    said: list[Any]
    barrier: Barrier

    def tell(self, what: Any) -> list[Any]:
        self.said[self.place] = what
        self.barrier.wait()
        heard = list(self.said)
        self.barrier.wait()
        return heard

    def gather(self, data: bytes, name: str) -> list[bytes]:
        return self.tell(data)

    def broadcast(self, state: Mapping[str, Any], root: int, name: str) -> Mapping[str, Any]:
        received: Mapping[str, Any] = self.tell(state)[root]
        return received

    def average(self, array: Any, name: str) -> Any:
        return sum(self.tell(array)) / len(self.said)

    def beside(self, array: Any, other: Any) -> Any:
        return array


class Job:
    """Ranks in threads, in the order in which Horovod's driver lists them: who stayed first.

    Args:
        make: makes a rank.
        size: how many there are at first.
        begin: what ranks do before they meet: all of them, and those that are new.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        size: int,
        begin: Callable[[list[Any], list[Any]], None] = lambda ranks, new: None,
    ) -> None:
        self.make, self.begin = make, begin
        self.ranks: list[Any] = []
        self.meet(joining=size)

    def together(self, what: Callable[[Any], Any]) -> list[Any]:
        """Return what all ranks return, one thread each."""
        said, barrier = [None] * len(self.ranks), Barrier(len(self.ranks), timeout=PATIENCE)
        for place, rank in enumerate(self.ranks):
            rank.place, rank.said, rank.barrier = place, said, barrier
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            return [done.result() for done in [pool.submit(what, rank) for rank in self.ranks]]

    def meet(self, gone: Sequence[int] = (), joining: int = 0) -> None:
        self.ranks = [rank for place, rank in enumerate(self.ranks) if place not in gone]
        new = [self.make() for _ in range(joining)]
        self.ranks += new
        self.begin(self.ranks, new)
        self.together(lambda rank: rank.manager.reconcile())

    def leave(self, gone: Sequence[int], joining: int = 0) -> None:
        """With a warning."""
        self.together(lambda rank: rank.manager.hand_over())
        self.meet(gone, joining)

    def lose(self, gone: Sequence[int], joining: int = 0) -> None:
        """Without."""
        for place, rank in enumerate(self.ranks):
            if place not in gone:
                rank.manager.restore()
        self.meet(gone, joining)

    def commit(self) -> None:
        for rank in self.ranks:
            rank.manager.save()
