"""`make bench-trouble`: a slow rank, and links that lose packets, dense Horovod beside TopKEF.

Hosts are network namespaces of this machine (`cluster`) with one rank each. There is a job for each
kind of trouble; in it the digits are trained with every method in turns (`trouble_rank`). Writes
docs/results/trouble.json and docs/trouble.md.

    sudo make bench-trouble                           # all jobs: a quarter of an hour
    sudo make bench-trouble ARGS="loss-1"             # this job; other results are kept

The authors' bias: they want TopKEF to win.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.jobs import Jobs, on_hosts
from cluster import Cluster, Link
from cluster.host import INTERFACE, NETWORK
from horovod_topk.cli.machine import machine

RANK = Path(__file__).with_name("trouble_rank.py")
GRACE_SECONDS = 240.0  # of a job, beside its training
HOSTS = 4
RATE = "100mbit"  # of each host's link
STEPS = 150
COMPUTE = 0.02  # seconds that a rank sleeps in a step, in place of a model's compute
WAYS = ("dense", "TopKEF", "TopKEF int8")


@dataclass(frozen=True)
class Run:
    """One job; all methods take turns in it."""

    title: str
    loss: float = 0.0  # share of the packets
    slow: float = 1.0  # of the last rank: its compute, as a multiple of the others'
    rto_min: str | None = None  # TCP's least time-out before it sends again; None: 200ms
    limit_seconds: float = 200.0  # of training; then all ranks stop


RUNS = {
    "none": Run("none"),
    "slow": Run("rank 3 computes 10 times longer", slow=10.0),
    "loss-1": Run("1% of the packets lost", loss=0.01),
    "loss-10": Run("10% of the packets lost", loss=0.1),
    "loss-1-soon": Run("1% lost, sent again after 5 ms", loss=0.01, rto_min="5ms"),
    "loss-10-soon": Run("10% lost, sent again after 5 ms", loss=0.1, rto_min="5ms"),
    "none-again": Run("none, measured once more"),
}
PLAIN = "none"  # what the others are compared with


def measure(run: Run, args: argparse.Namespace) -> dict[str, Any]:
    """Run one job."""

    def send_again_sooner(cluster: Cluster) -> None:
        """Set TCP's least time-out before it sends a lost packet again, between the hosts."""
        for host in cluster.hosts if run.rto_min else ():
            route = [NETWORK.format(number="0/24"), "dev", INTERFACE, "src", host.address]
            host.check(["ip", "route", "change", *route, "rto_min", str(run.rto_min)])

    load, limit = os.getloadavg(), run.limit_seconds
    command = [RANK, "--steps", args.steps, "--slow", run.slow, "--limit-seconds", limit]
    cluster = Cluster(HOSTS, Link.of(RATE, run.loss))
    job = on_hosts(command, cluster, limit + GRACE_SECONDS, prepare=send_again_sooner)
    date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    loads = {"before": round(load[0], 1), "after": round(os.getloadavg()[0], 1)}
    return {
        **job,
        "planned_steps": args.steps,
        "load": loads,
        "machine": machine() | {"date": date},
    }


JOBS = Jobs("trouble", RUNS, measure)


def main(arguments: Sequence[str]) -> int:
    """Measure and write; the exit status."""
    parser = JOBS.parser(__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    return JOBS.main(parser, arguments)
