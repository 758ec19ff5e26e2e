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
    payload: float  # the same without headers
    idle: float  # leaves it in the same time when nothing is exchanged, with all headers
    stats: float | None  # what `TopKEF.stats()` says is sent
    cycles: float | None  # of Horovod, in which its ranks talk; None: not counted
    exchanged: float | None  # of what left the card in a second try, all but talk, with headers
    carried: float | None  # the same without headers


def figures(job: Job) -> dict[str, Figures]:
    """By the ways' names."""
    return {way["way"]: _mean(way["hosts"]) for way in job["ways"]}


def reductions(found: dict[str, Figures]) -> dict[str, float]:
    """How many times fewer bytes leave the card than with Horovod's dense allreduce."""
    return {name: found[DENSE].card / each.card for name, each in found.items()}


def reductions_of_exchanges(found: dict[str, Figures]) -> dict[str, float]:
    """The same of what is exchanged alone, where that was told from talk."""
    each = {name: figures.exchanged for name, figures in found.items()}
    dense = each[DENSE]
    return {name: dense / bytes_ for name, bytes_ in each.items() if dense and bytes_}


def _mean(hosts: list[dict[str, Any]]) -> Figures:
    def mean(key: str) -> float | None:
        each = [host.get(key) for host in hosts]
        return None if None in each else statistics.fmean(each)  # type: ignore[arg-type]

    names = "bytes", "payload", "idle_bytes", "stats", "cycles", "exchanged_bytes"
    seconds = max(host["seconds"] for host in hosts)
    return Figures(seconds, *map(mean, (*names, "exchanged_payload")))  # type: ignore[arg-type]
