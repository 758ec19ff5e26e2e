"""Measures time, CPU time and bytes of the runners' steps, in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import horovod.torch as hvd
import torch

from horovod_topk.cli.bench.barrier import barrier
from horovod_topk.cli.bench.nic import sent
from horovod_topk.cli.bench.runners import Runner


@dataclass(frozen=True)
class Taken:
    """The measurements of one runner."""

    seconds: list[float]  # each round's step, on the slowest rank
    cpu: list[float]  # each round's step, in seconds of a core, all threads: mean over ranks
    bytes: (
        float | None
    )  # bytes that left a host's card in a step (median of rounds, mean of hosts), if counted


@dataclass(frozen=True)
class Cost:
    """Wall-clock and CPU time on one rank."""

    seconds: float
    cpu: float  # seconds of a core, for all threads of this process

    @classmethod
    def so_far(cls) -> Cost:
        """The time of both clocks now, for differences."""
        return cls(time.perf_counter(), time.process_time())

    def __sub__(self, earlier: Cost) -> Cost:
        return Cost(self.seconds - earlier.seconds, self.cpu - earlier.cpu)


def race(runners: Mapping[str, Runner], rounds: int, interface: str | None) -> dict[str, Taken]:
    """Run rounds of one step for each runner, after all have warmed up.

    Args:
        runners: the runners by name.
        rounds: number of rounds.
        interface: network card whose bytes are counted; None if ranks share one host.
    """
    for runner in runners.values():
        for _ in range(runner.warm_up):
            timed(runner)
    costs: dict[str, list[Cost]] = {name: [] for name in runners}
    octets: dict[str, list[int]] = {name: [] for name in runners}
    for _ in range(rounds):
        for name, runner in runners.items():
            if interface is None:
                costs[name].append(timed(runner))
                continue
            cost, count = counted(runner, interface)
            costs[name].append(cost)
            octets[name].append(count)
    medians = {name: statistics.median(each) if each else None for name, each in octets.items()}
    return {name: taken(costs[name], medians[name]) for name in runners}


def counted(runner: Runner, interface: str) -> tuple[Cost, int]:
    """Time a step, and count the bytes that left this host's card."""
    barrier()
    before = sent(interface)
    cost = timed(runner)
    barrier()  # wait until all ranks have received
    return cost, (sent(interface) - before).bytes


def timed(runner: Runner) -> Cost:
    """Time a step that all ranks begin together, on this rank."""
    barrier()
    before = Cost.so_far()
    runner.step()
    cost = Cost.so_far() - before
    runner.clear()
    return cost


def taken(own: Sequence[Cost], octets: float | None) -> Taken:
    """Combine the measurements of all ranks."""
    seconds = torch.tensor([cost.seconds for cost in own], dtype=torch.float64)
    cpu = torch.tensor([cost.cpu for cost in own], dtype=torch.float64)
    slowest = hvd.allreduce(seconds, op=hvd.Max, name="bench.slowest")
    mean = hvd.allreduce(cpu, op=hvd.Average, name="bench.cpu")
    return Taken(slowest.tolist(), mean.tolist(), _mean_of_hosts(octets))


def _mean_of_hosts(octets: float | None) -> float | None:
    """The mean of the bytes that each host's first rank has counted."""
    each = hvd.allgather_object(octets if hvd.local_rank() == 0 else None, name="bench.bytes")
    found = [one for one in each if one is not None]
    return statistics.fmean(found) if found else None
