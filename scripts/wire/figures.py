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
    def exchanged(self) -> float:
        """What the exchange itself took, with its headers."""
        return self.card - self.idle

    @property
    def disagreement(self) -> float:
        """Of stats() with the card, without headers and negotiation: a share of stats()."""
        assert self.stats is not None
        return (self.payload - self.idle_payload) / self.stats - 1


def figures(job: Job) -> dict[str, Figures]:
    """By the ways' names."""
    return {way["way"]: _mean(way["hosts"]) for way in job["ways"]}


def reductions(found: dict[str, Figures]) -> dict[str, float]:
    """How many times fewer bytes the exchange takes than Horovod's dense allreduce."""
    dense = found[DENSE].exchanged
    return {name: dense / each.exchanged for name, each in found.items()}


def _mean(hosts: list[dict[str, Any]]) -> Figures:
    def mean(key: str) -> float:
        return statistics.fmean(host[key] for host in hosts)

    stats = None if hosts[0]["stats"] is None else mean("stats")
    return Figures(
        max(host["seconds"] for host in hosts),
        *map(mean, ("bytes", "idle_bytes", "payload", "idle_payload")),
        stats,
    )
