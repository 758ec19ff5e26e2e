"""Measures time, CPU time and bytes of the runners' steps, in turns."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from horovod_topk.cli.bench.nic import sent
from horovod_topk.cli.bench.ranks import Ranks, barrier, mean, most
from horovod_topk.cli.bench.runners import Runner
from horovod_topk.cli.timing import in_turns


@dataclass(frozen=True)
class Taken:
    """The measurements of one runner."""

    seconds: list[float]  # each round's step, on the slowest rank
    cpu: list[float]  # each round's step, in seconds of a core, all threads: mean over ranks
    bytes: float | None  # that left a host's card in a step, if counted: median, mean of hosts


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


def race(
    ranks: Ranks, runners: Mapping[str, Runner], rounds: int, interface: str | None
) -> dict[str, Taken]:
    """Run rounds of one step for each runner, after all have warmed up.

    interface: network card whose bytes are counted; None if ranks share one host.
    """
    for runner in runners.values():
        for _ in range(runner.warm_up):
            timed(ranks, runner)
    measures = {name: partial(counted, ranks, each, interface) for name, each in runners.items()}
    found = in_turns(measures, rounds)
    of_each = {name: tuple(zip(*each, strict=True)) for name, each in found.items()}
    return {
        name: taken(ranks, costs, statistics.median(octets))
        for name, (costs, octets) in of_each.items()
    }


def counted(ranks: Ranks, runner: Runner, interface: str | None) -> tuple[Cost, float]:
    """Time a step, and count the bytes that this host's network card sent (NaN without a card)."""
    if interface is None:
        return timed(ranks, runner), math.nan
    barrier(ranks)
    before = sent(interface)
    cost = timed(ranks, runner)
    barrier(ranks)  # wait until all ranks have received
    return cost, (sent(interface) - before).bytes


def timed(ranks: Ranks, runner: Runner) -> Cost:
    """Time a step that all ranks begin together, on this rank."""
    barrier(ranks)
    before = Cost.so_far()
    runner.step()
    cost = Cost.so_far() - before
    runner.clear()
    return cost


def taken(ranks: Ranks, own: Sequence[Cost], octets: float) -> Taken:
    """Combine the measurements of all ranks."""
    seconds = most(ranks, [cost.seconds for cost in own])
    return Taken(seconds, mean(ranks, [cost.cpu for cost in own]), _mean_of_hosts(ranks, octets))


def _mean_of_hosts(ranks: Ranks, octets: float) -> float | None:
    """The mean of the bytes that each host's first rank has counted."""
    own = octets if ranks.local_rank == 0 else math.nan
    found = [one for (one,) in ranks.gather([own]) if not math.isnan(one)]
    return statistics.fmean(found) if found else None
