"""Collectives between the simulated ranks of one process, for `core.exchange`.

Ranks run in lock-step: all start a collective before the first waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from horovod_topk.core.plan.nodes import Location

Joined = Callable[[list[Tensor]], list[Tensor]]  # every rank's input -> every rank's output


@dataclass
class Loopback:
    """The network between `size` ranks."""

    size: int
    posted: dict[str, list[Tensor]] = field(default_factory=dict)  # by collective, in rank order
    arrived: dict[str, list[Tensor]] = field(default_factory=dict)
    groups: dict[tuple[int, ...], Loopback] = field(default_factory=dict)  # networks of groups

    def receive(self, name: str, rank: int, joined: Joined) -> Tensor:
        """The data that a rank receives; the last rank to receive ends the collective.

        Raises:
            RuntimeError: a rank has not started the collective.
        """
        if name not in self.arrived:
            payloads = self.posted.pop(name)
            if len(payloads) != self.size:
                raise RuntimeError(f"{name}: {len(payloads)} of {self.size} ranks have started it")
            self.arrived[name] = joined(payloads)
        received = self.arrived[name][rank]
        if rank == self.size - 1:
            del self.arrived[name]
        return received


@dataclass(frozen=True)
class Pending:
    """A started collective."""

    wire: Loopback
    name: str
    rank: int
    joined: Joined

    def wait(self) -> Tensor:
        """The data that this rank receives, in rank order."""
        return self.wire.receive(self.name, self.rank, self.joined)


@dataclass(frozen=True)
class Collective:
    """`core.exchange.Collective` of one simulated rank."""

    wire: Loopback
    rank: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.wire.size

    @property
    def location(self) -> Location:
        """The location of this rank: two ranks share a node."""
        node, local = divmod(self.rank, 2)
        return Location(f"node{node}", local, 2 * node)

    def can_split(self, groups: Sequence[Sequence[int]]) -> bool:
        """Return True."""
        return True

    def allgather(self, payload: Tensor, name: str, counts: Sequence[int] | None = None) -> Pending:
        """Start to gather all payloads on every rank."""
        return self._start(payload, name, _to_all)

    def alltoall(self, payloads: Tensor, name: str) -> Pending:
        """Start to send the p-th stretch of each array to rank p."""
        return self._start(payloads, name, _to_each)

    def reduce_scatter(self, array: Tensor, counts: Sequence[int], name: str) -> Pending:
        """Start to sum arrays, and to send a stretch of counts[p] elements to rank p."""
        return self._start(array, name, partial(_sum_to_each, counts))

    def allreduce(self, array: Tensor, name: str) -> Pending:
        """Start to sum arrays on every rank."""
        return self._start(array, name, _sum_to_all)

    def split(self, groups: Sequence[Sequence[int]]) -> Sequence[Collective | None]:
        """Collectives among groups of ranks; None for groups without this rank."""
        wires = [self.wire.groups.setdefault(tuple(g), Loopback(len(g))) for g in groups]
        return [
            Collective(wire, group.index(self.rank)) if self.rank in group else None
            for wire, group in zip(wires, groups, strict=True)
        ]

    def _start(self, payload: Tensor, name: str, joined: Joined) -> Pending:
        self.wire.posted.setdefault(name, []).append(payload)
        return Pending(self.wire, name, self.rank, joined)


def _to_all(payloads: list[Tensor]) -> list[Tensor]:
    return [torch.cat(payloads)] * len(payloads)


def _to_each(payloads: list[Tensor]) -> list[Tensor]:
    ranks = len(payloads)
    dealt = torch.stack(payloads).view(ranks, ranks, -1).transpose(0, 1)
    return list(dealt.reshape(ranks, -1))


def _sum_to_all(arrays: list[Tensor]) -> list[Tensor]:
    (total,) = _sum_to_each([arrays[0].numel()], arrays)
    return [total] * len(arrays)


def _sum_to_each(counts: Sequence[int], arrays: list[Tensor]) -> list[Tensor]:
    total = arrays[0].clone()
    for other in arrays[1:]:
        total += other
    return list(torch.split(total, list(counts)))
