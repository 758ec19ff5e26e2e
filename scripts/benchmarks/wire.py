"""`make bench-wire`: the bytes that leave a host's network card, for a ResNet-50's gradients.

Hosts are network namespaces of this machine (`cluster`) with links of 1 Gbit/s. There is a job for
each number of hosts, number of ranks a host and cycle time; all methods take turns in it
(`wire_rank`). Writes docs/results/wire.json and docs/network.md.

    sudo make bench-wire                               # all jobs: half an hour on two cores
    sudo make bench-wire ARGS="2x1:50 4x2:50"          # these jobs: hosts x ranks : milliseconds

Horovod's ranks exchange messages once a cycle, by default every millisecond, even when idle. At a
cycle of 50 ms few of these bytes are left, so the cost of payloads shows; the default cycle is
measured as well.

The authors' bias: they want few bytes for TopKEF. The same counters count every method.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.jobs import Jobs, on_ranks
from cluster import Cluster, Link
from horovod_topk.cli.bench.nic import HEADERS
from horovod_topk.cli.machine import machine
from pages import Values
from pages.markdown import table

QUIET, DEFAULT = 50, 1  # milliseconds a cycle
LIMIT_SECONDS = 1200.0  # a job
CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")

DENSE, HALF = "Horovod, dense", "Horovod, fp16"
Job = dict[str, Any]
EXCHANGES = ("allgather", "sharded")
NODES = "hierarchical"  # where a host has several ranks
VALUES = ("float32", "int8", "int4")


@dataclass(frozen=True)
class Way:
    """A method to exchange gradients."""

    exchange: str
    values: str
    ratio: float = 0.01

    @property
    def name(self) -> str:
        """As in tables and in files."""
        if self.exchange in (DENSE, HALF):
            return self.exchange
        return f"{self.exchange}, {self.values}, {self.ratio:g}"


def ways(slots: int = 1) -> Iterator[Way]:
    """All methods for so many ranks a host, dense first."""
    yield Way(DENSE, "float32")
    yield Way(HALF, "float16")
    for exchange in EXCHANGES if slots == 1 else (*EXCHANGES, NODES):
        yield from (Way(exchange, values) for values in VALUES)


@dataclass(frozen=True)
class Setting:
    """The settings of a job."""

    hosts: int
    cycle: int = QUIET
    slots: int = 1  # ranks a host

    @property
    def name(self) -> str:
        """On the command line and in the file of results."""
        return f"{self.hosts}x{self.slots}:{self.cycle}"

    @property
    def environment(self) -> dict[str, str]:
        """Horovod's; process sets add messages to every cycle, and only hierarchical needs them."""
        found = {"HOROVOD_CYCLE_TIME": str(self.cycle)}
        return found | {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"} if self.slots > 1 else found


def measure(setting: Setting, args: argparse.Namespace) -> dict[str, Any]:
    """Run one job: bytes that each card sent with each method."""
    cluster = Cluster(setting.hosts, Link.of("1gbit"), slots=setting.slots)
    job = on_ranks("wire_rank", setting, args, cluster, LIMIT_SECONDS, setting.environment)
    there = {"congestion control": CONTROL.read_text().strip(), "cycle": setting.cycle}
    return {"cycle": setting.cycle, **job, "machine": machine() | there}


SETTINGS = (
    *(Setting(hosts, cycle) for cycle in (QUIET, DEFAULT) for hosts in (2, 4, 8)),
    *(Setting(hosts, slots=2) for hosts in (2, 4)),
)
OPTIONS = {"steps": (2, "counted steps of each method")}
JOBS = Jobs("wire", {each.name: each for each in SETTINGS}, measure, OPTIONS, indent=1)


def values(results: Mapping[str, Job]) -> Values:
    """Return the figures that the page shows, by name."""
    jobs = [results[name] for name in JOBS.named if name in results]
    alone = [job for job in jobs if job["slots"] == 1]
    return {
        "headers": HEADERS,
        "quiet": QUIET,
        "overhead": _overhead(alone),
        "reduced": _reduced([job for job in alone if job["cycle"] == QUIET]),
        "shared": _reduced([job for job in jobs if job["slots"] > 1]),
    }


def _hosts(job: Job) -> int:
    return int(job["ranks"] // job["slots"])


def _overhead(jobs: list[Job]) -> str:
    """Return a table of the bytes on the card for each byte that `stats()` counts."""
    header = ["", *(f"{_hosts(job)} hosts, {job['cycle']} ms" for job in jobs)]
    found = [figures(job) for job in jobs]
    rows = (
        [name, *(f"{of[name].card / (of[name].stats or math.nan):.2f}" for of in found)]
        for name, each in found[0].items()
        if each.stats
    )
    return table(header, rows)


def _reduced(jobs: list[Job]) -> str:
    """Return how many times fewer bytes leave the card than with Horovod's dense allreduce."""
    found = {_hosts(job): figures(job) for job in jobs}
    names = [name for name in next(iter(found.values())) if name not in (DENSE, HALF)]
    rows = (
        [name, *(f"{of[DENSE].card / of[name].card:,.0f}" for of in found.values())]
        for name in names
    )
    return table(("", *(f"{hosts} hosts" for hosts in found)), rows)


@dataclass(frozen=True)
class Figures:
    """What one method sends in one job, in bytes a step and host."""

    card: float  # left the card, with all headers
    stats: float | None  # bytes that leave a host, by `TopKEF.stats()`


def figures(job: Job) -> dict[str, Figures]:
    """Return results by the names of the measured methods."""
    names = {way.name for way in ways(job["slots"])}
    return {way["way"]: _mean(way["hosts"]) for way in job["ways"] if way["way"] in names}


def _mean(hosts: list[dict[str, Any]]) -> Figures:
    stats = [host["stats"] for host in hosts]
    card = statistics.fmean(host["bytes"] for host in hosts)
    return Figures(card, None if None in stats else statistics.fmean(stats))
