"""Contestants take turns; what each of their steps took and sent."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import horovod.torch as hvd
import torch

from horovod_topk.cli.bench.card import sent
from horovod_topk.cli.bench.contestants import Contestant
from horovod_topk.cli.bench.meeting import meet


@dataclass(frozen=True)
class Taken:
    """By one contestant."""

    seconds: list[float]  # each round's step, of the rank that took longest
    cpu: list[float]  # each round's step, in seconds of a core, all threads: the mean over ranks
    bytes: (
        float | None
    )  # left a host's card in a step (median of rounds, mean of hosts), if counted


@dataclass(frozen=True)
class Cost:
    """On one rank."""

    seconds: float
    cpu: float  # seconds of a core, of all threads of this process

    @classmethod
    def so_far(cls) -> Cost:
        """Since some moment that stays the same."""
        return cls(time.perf_counter(), time.process_time())

    def __sub__(self, earlier: Cost) -> Cost:
        return Cost(self.seconds - earlier.seconds, self.cpu - earlier.cpu)


def race(
    contestants: Mapping[str, Contestant], rounds: int, interface: str | None
) -> dict[str, Taken]:
    """Some rounds of one step each, after each has warmed up.

    Args:
        contestants: by name.
        rounds: how many.
        interface: whose bytes count; None where ranks share one host.
    """
    for contestant in contestants.values():
        for _ in range(contestant.warm_up):
            timed(contestant)
    costs: dict[str, list[Cost]] = {name: [] for name in contestants}
    octets: dict[str, list[int]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, contestant in contestants.items():
            if interface is None:
                costs[name].append(timed(contestant))
                continue
            cost, count = counted(contestant, interface)
            costs[name].append(cost)
            octets[name].append(count)
    medians = {name: statistics.median(each) if each else None for name, each in octets.items()}
    return {name: taken(costs[name], medians[name]) for name in contestants}


def counted(contestant: Contestant, interface: str) -> tuple[Cost, int]:
    """A timed step, and the bytes that left this host's card."""
    meet()
    before = sent(interface)
    cost = timed(contestant)
    meet()  # what this rank has sent may still be on its way
    return cost, (sent(interface) - before).bytes


def timed(contestant: Contestant) -> Cost:
    """Of a step that all ranks begin together, on this rank."""
    meet()
    before = Cost.so_far()
    contestant.step()
    cost = Cost.so_far() - before
    contestant.clear()
    return cost


def taken(own: Sequence[Cost], octets: float | None) -> Taken:
    """By all ranks, of what this one found."""
    seconds = torch.tensor([cost.seconds for cost in own], dtype=torch.float64)
    cpu = torch.tensor([cost.cpu for cost in own], dtype=torch.float64)
    slowest = hvd.allreduce(seconds, op=hvd.Max, name="bench.slowest")
    mean = hvd.allreduce(cpu, op=hvd.Average, name="bench.cpu")
    return Taken(slowest.tolist(), mean.tolist(), _mean_of_hosts(octets))


def _mean_of_hosts(octets: float | None) -> float | None:
    """Of what each host's first rank has counted."""
    each = hvd.allgather_object(octets if hvd.local_rank() == 0 else None, name="bench.bytes")
    found = [one for one in each if one is not None]
    return statistics.fmean(found) if found else None
