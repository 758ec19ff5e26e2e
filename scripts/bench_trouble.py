"""`make bench-trouble`: a slow rank, and links that lose packets, dense Horovod beside TopKEF.

Hosts are network namespaces of this machine (`scripts/cluster`) with one rank each. There is a job
for each kind of trouble (`trouble.runs`); in it the digits are trained with every method in turns.
Writes docs/results/trouble.json and docs/trouble.md.

    sudo make bench-trouble                           # all jobs: a quarter of an hour
    sudo make bench-trouble ARGS="loss-1"             # this job; other results are kept
    make bench-trouble ARGS="--page"                  # the page alone, from stored results

The authors' bias: they want TopKEF to win.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import launch
from cluster import Cluster, ClusterError, Link
from cluster.host import INTERFACE, NETWORK
from horovod_topk.cli.machine import machine
from runs import Runs
from trouble import report
from trouble.runs import HOSTS, RATE, RUNS, STEPS, Run

RANK = launch.ROOT / "scripts" / "trouble" / "rank.py"
KEPT = Runs(RUNS, launch.ROOT / "docs" / "results" / "trouble.json")
PAGE = launch.ROOT / "docs" / "trouble.md"
GRACE_SECONDS = 240.0  # of a job, beside its training


def measure(run: Run, steps: int) -> dict[str, Any]:
    """Run one job.

    Raises:
        ClusterError: it failed.
    """
    link, load = Link.of(RATE, run.loss), os.getloadavg()
    with tempfile.TemporaryDirectory() as folder, Cluster(HOSTS, link) as cluster:
        found = Path(folder) / "found.json"
        if run.rto_min:
            send_again_sooner(cluster, run.rto_min)
        arguments = ["--steps", str(steps), "--slow", str(run.slow), "--json", str(found)]
        cluster.run(
            [
                *("horovodrun", "--gloo", sys.executable, str(RANK), *arguments),
                *("--limit-seconds", str(run.limit_seconds)),
            ],
            {"OMP_NUM_THREADS": "1", "PYTHONPATH": launch.python_path()},
            limit_seconds=run.limit_seconds + GRACE_SECONDS,
        )
        job: dict[str, Any] = json.loads(found.read_text())
    date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    loads = {"before": round(load[0], 1), "after": round(os.getloadavg()[0], 1)}
    return {**job, "planned_steps": steps, "load": loads, "machine": machine() | {"date": date}}


def send_again_sooner(cluster: Cluster, rto_min: str) -> None:
    """Set TCP's least time-out before it sends a lost packet again, between the hosts.

    Raises:
        ClusterError: the kernel does not take it.
    """
    for host in cluster.hosts:
        route = [NETWORK.format(number="0/24"), "dev", INTERFACE, "src", host.address]
        host.check(["ip", "route", "change", *route, "rto_min", rto_min])


def main() -> int:
    """Measure and write; the exit status."""
    parser = KEPT.parser(__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    args = KEPT.parse(parser)
    try:
        results = KEPT.measure(args, lambda run: measure(run, args.steps))
    except ClusterError as error:
        print(f"bench-trouble: {error}", file=sys.stderr)
        return 1
    PAGE.write_text(report.page(results))
    print(f"written: {PAGE.relative_to(launch.ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
