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
    cycles: float  # of Horovod, in which its ranks talk
    card: float  # left the card, with all headers
    idle: float  # leaves it in the same time when nothing is exchanged, with all headers
    talk: float  # leaves it in as many cycles in which nothing is exchanged, with all headers
    payload: float  # `card` without headers
    talk_payload: float  # `talk` without headers
    stats: float | None  # what `TopKEF.stats()` says is sent

    @property
    def disagreement(self) -> float:
        """How much more the packets carry than `stats()` says, as a share of that."""
        assert self.stats is not None
        return (self.payload - self.talk_payload) / self.stats - 1


def figures(job: Job) -> dict[str, Figures]:
    """By the ways' names."""
    return {way["way"]: _mean(way["hosts"]) for way in job["ways"]}


def reductions(found: dict[str, Figures]) -> dict[str, float]:
    """How many times fewer bytes leave the card than with Horovod's dense allreduce."""
    return {name: found[DENSE].card / each.card for name, each in found.items()}


def reductions_of_exchanges(found: dict[str, Figures]) -> dict[str, float]:
    """The same with the talk of as many cycles taken off both."""
    dense = found[DENSE].card - found[DENSE].talk
    return {name: dense / (each.card - each.talk) for name, each in found.items()}


def _mean(hosts: list[dict[str, Any]]) -> Figures:
    def mean(key: str) -> float:
        return statistics.fmean(host[key] for host in hosts)

    stats = None if hosts[0]["stats"] is None else mean("stats")
    return Figures(
        max(host["seconds"] for host in hosts),
        *map(mean, ("cycles", "bytes", "idle_bytes", "talk_bytes", "payload", "talk_payload")),
        stats,
    )
