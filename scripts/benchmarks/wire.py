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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.jobs import Jobs, on_hosts
from cluster import Cluster, Link
from horovod_topk.cli.machine import machine

QUIET, DEFAULT = 50, 1  # milliseconds a cycle
LIMIT_SECONDS = 1200.0  # a job
RANK = Path(__file__).with_name("wire_rank.py")
CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")

DENSE, HALF = "Horovod, dense", "Horovod, fp16"
EXCHANGES = ("allgather", "sharded")
NODES = "hierarchical"  # where a host has several ranks
VALUES = ("float32", "int8", "int4")
SETTINGS = ({"ratio": 0.01}, {"ratio": 0.001, "min_numel": 0})  # what TopKEF is given


@dataclass(frozen=True)
class Way:
    """A method to exchange gradients."""

    exchange: str
    values: str
    ratio: float = 1.0
    min_numel: int = 1024

    @property
    def name(self) -> str:
        """As in tables and in files."""
        if self.exchange in (DENSE, HALF):
            return self.exchange
        suffix = "" if self.min_numel else ", min_numel=0"
        return f"{self.exchange}, {self.values}, {self.ratio:g}{suffix}"


def ways(slots: int = 1) -> Iterator[Way]:
    """All methods for so many ranks a host, dense first."""
    yield Way(DENSE, "float32")
    yield Way(HALF, "float16")
    exchanges = EXCHANGES if slots == 1 else (*EXCHANGES, NODES)
    for settings in SETTINGS:
        for exchange in exchanges:
            for values in VALUES:
                yield Way(exchange, values, **settings)


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
    job = on_hosts([RANK, "--steps", args.steps], cluster, LIMIT_SECONDS, setting.environment)
    there = {"congestion control": CONTROL.read_text().strip(), "cycle": setting.cycle}
    return {"cycle": setting.cycle, **job, "machine": machine() | there}


SETTINGS_OF_JOBS = (
    *(Setting(hosts) for hosts in range(2, 9)),
    *(Setting(hosts, DEFAULT) for hosts in (2, 4, 8)),
    *(Setting(hosts, slots=2) for hosts in (2, 4)),
)
JOBS = Jobs("wire", {each.name: each for each in SETTINGS_OF_JOBS}, measure, indent=1)


def main(arguments: Sequence[str]) -> int:
    """Measure and write; the exit status."""
    parser = JOBS.parser(__doc__)
    parser.add_argument("--steps", type=int, default=2, help="counted steps of each method")
    return JOBS.main(parser, arguments)
