"""Contestants take turns; what each of their steps took and sent."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import horovod.torch as hvd
import torch

from horovod_topk.cli.bench.card import Sent, sent
from horovod_topk.cli.bench.contestants import Contestant


@dataclass(frozen=True)
class Taken:
    """By one contestant."""

    seconds: list[float]  # each round's step, of the rank that took longest
    cpu: list[float]  # each round's step, in seconds of a core, all threads: the mean over ranks
    bytes: float | None  # left a host's card in a step: the mean over hosts; None: not counted


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
    octets = {}
    for name, contestant in contestants.items():
        for _ in range(contestant.warm_up):
            timed(contestant)
        octets[name] = None if interface is None else _bytes_of(contestant, interface)
    own: dict[str, list[Cost]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, contestant in contestants.items():
            own[name].append(timed(contestant))
    return {name: taken(own[name], octets[name]) for name in contestants}


def timed(contestant: Contestant) -> Cost:
    """Of a step that all ranks begin together, on this rank."""
    hvd.barrier()
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
    return Taken(slowest.tolist(), mean.tolist(), octets)


def _bytes_of(contestant: Contestant, interface: str) -> float:
    """What leaves a host in a step: the mean over the hosts."""
    octets = during(contestant.step, interface).bytes
    contestant.clear()
    return mean_of_hosts(octets)


def mean_of_hosts(octets: float | None) -> float:
    """Of what each host's first rank has counted."""
    each = hvd.allgather_object(octets if hvd.local_rank() == 0 else None, name="bench.bytes")
    return statistics.fmean(one for one in each if one is not None)


def during(action: Callable[[], None], interface: str) -> Sent:
    """What this host's card sends while all ranks do something."""
    hvd.barrier()
    before = sent(interface)
    action()
    hvd.barrier()  # what this rank has sent may still be on its way
    return sent(interface) - before
