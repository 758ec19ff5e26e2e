"""Bytes that a job's network cards sent, per step and host: means over the hosts."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from wire.ways import DENSE

Job = dict[str, Any]


@dataclass(frozen=True)
class Figures:
    """Of one method in one job, in bytes a step and host."""

    seconds: float  # a step, on a busy machine
    card: float  # left the card, with all headers
    payload: float  # the same without headers
    idle: float  # leave an idle job in the same time, with all headers
    stats: float | None  # bytes that leave a host, by `TopKEF.stats()`
    cycles: float | None  # Horovod's negotiation cycles; None: not counted
    exchanged: float | None  # on the card without negotiation, with headers
    carried: float | None  # the same without headers


def figures(job: Job) -> dict[str, Figures]:
    """By the methods' names."""
    return {way["way"]: _mean(way["hosts"]) for way in job["ways"]}


def reductions(found: dict[str, Figures]) -> dict[str, float]:
    """How many times fewer bytes leave the card than with Horovod's dense allreduce."""
    return {name: found[DENSE].card / each.card for name, each in found.items()}


def reductions_of_exchanges(found: dict[str, Figures]) -> dict[str, float]:
    """The same without negotiation, where cycles were counted."""
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
