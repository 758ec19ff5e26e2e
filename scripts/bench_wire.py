"""`make bench-wire`: the bytes that leave a host's network card, for a ResNet-50's gradients.

Hosts are network namespaces of this machine (`scripts/cluster`) with links of 1 Gbit/s. There is a
job for each number of hosts, cycle time and number of ranks a host; all methods take turns in it
(`wire.rank`). Writes docs/results/wire.json and docs/wire.md.

    sudo make bench-wire                               # all jobs: half an hour on two cores
    sudo make bench-wire ARGS="--hosts 2 4 --keep"     # these jobs; other results are kept
    make bench-wire ARGS="--hosts"                     # the page alone, from stored results

Horovod's ranks exchange messages once a cycle, by default every millisecond, even when idle. At a
cycle of 50 ms few of these bytes are left, so the cost of payloads shows; the default cycle is
measured as well.

The authors' bias: they want few bytes for TopKEF. The same counters count every method.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from tqdm import tqdm

import launch
from cluster import Cluster, ClusterError, Link
from horovod_topk.cli.machine import machine
from wire import report

RATE = "1gbit"
HOSTS = range(2, 9)
QUIET, DEFAULT = 50, 1  # milliseconds a cycle
DEFAULT_HOSTS = (2, 4, 8)  # also measured at Horovod's default cycle
SHARED_HOSTS = (2, 4)  # also measured with several ranks each
SLOTS = 2  # ranks a host there
LIMIT_SECONDS = 1200.0  # a job
RANK = launch.ROOT / "scripts" / "wire" / "rank.py"
RESULTS = launch.ROOT / "docs" / "results" / "wire.json"
PAGE = launch.ROOT / "docs" / "wire.md"

Job = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """The settings of a job."""

    hosts: int
    cycle: int = QUIET
    slots: int = 1  # ranks a host

    @property
    def name(self) -> str:
        """For progress bars."""
        return f"{self.hosts} hosts x {self.slots}, cycle {self.cycle} ms"

    @property
    def counts_cycles(self) -> bool:
        """Whether cycles are counted, to subtract negotiation."""
        return self.cycle == QUIET

    @property
    def environment(self) -> dict[str, str]:
        """Horovod's; process sets add messages to every cycle, and only hierarchical needs them."""
        common = {"HOROVOD_CYCLE_TIME": str(self.cycle)}
        if self.counts_cycles:
            common |= {"HOROVOD_TIMELINE": "DYNAMIC"}
        return common | {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"} if self.slots > 1 else common


def settings(hosts: Sequence[int], cycles: Sequence[int]) -> Iterator[Setting]:
    """The settings to measure, for these numbers of hosts and cycles."""
    for count, cycle in product(hosts, cycles):
        if cycle == QUIET or count in DEFAULT_HOSTS:
            yield Setting(count, cycle)
    for count in hosts:
        if count in SHARED_HOSTS and QUIET in cycles:
            yield Setting(count, slots=SLOTS)


def measure(setting: Setting, steps: int) -> Job:
    """Run one job: bytes that each card sent with each method.

    Raises:
        ClusterError: it failed.
    """
    room = Cluster(setting.hosts, Link.of(RATE), slots=setting.slots)
    with tempfile.TemporaryDirectory() as folder, room as cluster:
        found = Path(folder) / "found.json"
        arguments = ["--steps", str(steps), "--json", str(found)]
        arguments += ["--count-cycles"] * setting.counts_cycles
        cluster.run(
            ["horovodrun", "--gloo", sys.executable, str(RANK), *arguments],
            setting.environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": launch.python_path()},
            limit_seconds=LIMIT_SECONDS,
        )
        job: Job = json.loads(found.read_text())
    control = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    there = machine() | {"congestion control": control, "cycle": setting.cycle}
    return {"cycle": setting.cycle, **job, "machine": there}


def merged(jobs: list[Job], new: Job) -> list[Job]:
    """The jobs, with the new one in place of the one it repeats."""

    def key(job: Job) -> tuple[int, int, int]:
        return job["slots"], -job["cycle"], job["ranks"]

    kept = [job for job in jobs if key(job) != key(new)]
    return sorted([*kept, new], key=key)


def main() -> int:
    """Measure and write; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, nargs="*", default=list(HOSTS))
    parser.add_argument("--cycles", type=int, nargs="*", default=[QUIET, DEFAULT])
    parser.add_argument("--steps", type=int, default=2, help="counted steps of each method")
    parser.add_argument("--keep", action="store_true", help="keep the results of other jobs")
    args = parser.parse_args()
    keep = args.keep or not args.hosts
    jobs: list[Job] = json.loads(RESULTS.read_text()) if keep and RESULTS.exists() else []
    try:
        for setting in (bar := tqdm(list(settings(args.hosts, args.cycles)), unit="job")):
            bar.set_postfix_str(setting.name)
            jobs = merged(jobs, measure(setting, args.steps))
            RESULTS.write_text(json.dumps(jobs, indent=1) + "\n")
    except ClusterError as error:
        print(f"bench-wire: {error}", file=sys.stderr)
        return 1
    page = report.page(jobs)
    PAGE.write_text(page)
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
