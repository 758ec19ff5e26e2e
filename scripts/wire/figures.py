"""What a job's cards sent, per step and host: means over the hosts."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from wire.ways import DENSE

Job = dict[str, Any]


@dataclass(frozen=True)
class Figures:
    """Of one way in one job, in bytes a step and host."""

    seconds: float  # a step, with the machine as busy as it was
    card: float  # left the card, with all headers
    idle: float  # leaves it in the same time when nothing is exchanged, with all headers
    payload: float  # `card` without headers
    idle_payload: float  # `idle` without headers
    stats: float | None  # what `TopKEF.stats()` says is sent

    @property
    def carried(self) -> tuple[float, float]:
        """Against stats(): what the packets carry, as if idle talk went on all the time, and all.

        While ranks exchange they talk less than when idle, so that the truth lies between.
        """
        assert self.stats is not None
        return (self.payload - self.idle_payload) / self.stats, self.payload / self.stats

    @property
    def disagreement(self) -> float:
        """How far stats() is outside of that, as a share of itself."""
        least, most = self.carried
        return max(0.0, least - 1) or min(0.0, most - 1)


def figures(job: Job) -> dict[str, Figures]:
    """By the ways' names."""
    return {way["way"]: _mean(way["hosts"]) for way in job["ways"]}


def reductions(found: dict[str, Figures]) -> dict[str, float]:
    """How many times fewer bytes leave the card than with Horovod's dense allreduce."""
    return {name: found[DENSE].card / each.card for name, each in found.items()}


def reductions_of_exchanges(found: dict[str, Figures]) -> dict[str, float]:
    """The same with idle talk taken off both."""
    dense = found[DENSE].card - found[DENSE].idle
    return {name: dense / (each.card - each.idle) for name, each in found.items()}


def _mean(hosts: list[dict[str, Any]]) -> Figures:
    def mean(key: str) -> float:
        return statistics.fmean(host[key] for host in hosts)

    stats = None if hosts[0]["stats"] is None else mean("stats")
    return Figures(
        max(host["seconds"] for host in hosts),
        *map(mean, ("bytes", "idle_bytes", "payload", "idle_payload")),
        stats,
    )
