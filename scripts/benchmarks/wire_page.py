"""Figures of docs/network.md, from the stored results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.wire import DENSE
from horovod_topk.cli.bench.nic import HEADERS
from pages import Values
from pages.markdown import table

Job = dict[str, Any]
RATIO = ", 0.01"  # names of the settings that the page shows end so
FEW = (2, 4, 8)  # numbers of hosts that the page shows


def values(results: Mapping[str, Job]) -> Values:
    """The page's figures by name."""
    jobs = list(results.values())
    quiet = max(job["cycle"] for job in jobs)
    return {
        "headers": HEADERS,
        "quiet": quiet,
        "overhead": _overhead(jobs),
        "reduced": _reduced([job for job in jobs if job["cycle"] == quiet and job["slots"] == 1]),
        "shared": _reduced([job for job in jobs if job["slots"] > 1]),
    }


def _hosts(job: Job) -> int:
    return int(job["ranks"] // job["slots"])


def _overhead(jobs: list[Job]) -> str:
    """Bytes on the card for each byte of `stats()`: a row a setting, a column a job."""
    alone = [job for job in jobs if job["slots"] == 1 and _hosts(job) in FEW]
    header = ["", *(f"{_hosts(job)} hosts, {job['cycle']} ms" for job in alone)]
    found = [figures(job) for job in alone]
    rows = []
    for name, each in found[0].items():
        if each.stats and name.endswith(RATIO):
            shares = [of[name].card / (of[name].stats or math.nan) for of in found]
            rows.append([name, *(f"{share:.2f}" for share in shares)])
    return table(header, rows)


def _reduced(jobs: list[Job]) -> str:
    """How many times fewer bytes leave the card than with Horovod's dense allreduce."""
    found = {_hosts(job): reductions(figures(job)) for job in jobs if _hosts(job) in FEW}
    names = [name for name in next(iter(found.values())) if name.endswith(RATIO)]
    rows = ([name, *(f"{of[name]:,.0f}" for of in found.values())] for name in names)
    return table(("", *(f"{hosts} hosts" for hosts in found)), rows)


@dataclass(frozen=True)
class Figures:
    """Of one method in one job, in bytes a step and host."""

    card: float  # left the card, with all headers
    stats: float | None  # bytes that leave a host, by `TopKEF.stats()`


def figures(job: Job) -> dict[str, Figures]:
    """By the methods' names."""
    return {way["way"]: _mean(way["hosts"]) for way in job["ways"]}


def reductions(found: dict[str, Figures]) -> dict[str, float]:
    """How many times fewer bytes leave the card than with Horovod's dense allreduce."""
    return {name: found[DENSE].card / each.card for name, each in found.items()}


def _mean(hosts: list[dict[str, Any]]) -> Figures:
    stats = [host["stats"] for host in hosts]
    card = statistics.fmean(host["bytes"] for host in hosts)
    return Figures(card, None if None in stats else statistics.fmean(stats))
