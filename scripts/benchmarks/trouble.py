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
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.jobs import Jobs, on_ranks
from cluster import Cluster, Link
from cluster.host import INTERFACE, NETWORK
from horovod_topk.cli.machine import machine
from pages import Values
from pages.markdown import table

GRACE_SECONDS = 240.0  # of a job, beside its training
HOSTS = 4
RATE = "100mbit"  # of each host's link
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

    cluster, limit = Cluster(HOSTS, Link.of(RATE, run.loss)), run.limit_seconds + GRACE_SECONDS
    job = on_ranks("trouble_rank", run, args, cluster, limit, prepare=send_again_sooner)
    return {**job, "machine": machine()}


JOBS = Jobs("trouble", RUNS, measure, {"steps": (150, "of each method")})


Job = dict[str, Any]
Results = dict[str, Job]


def values(results: Results) -> Values:
    """Return the figures that the page shows, by name."""
    return {
        "hosts": HOSTS,
        "rate": RATE.replace("mbit", " Mbit/s"),
        "compute": f"{1e3 * COMPUTE:g}",
        "times": _times(results),
        "same": "\n".join(_same_weights(results)),
        "sooner": "\n".join(_sooner(results)),
    }


def resent(job: Job) -> float:
    """Share of the TCP segments that were sent again."""
    sent = sum(host["sent"] for host in job["segments"])
    return float(sum(host["resent"] for host in job["segments"]) / sent)


def _times(results: Results) -> str:
    header = ["trouble", "packets sent again", "", "step, ms", "times none", "exchange, ms"]
    header += ["dense's step / this"]
    return table(header, (line for key in results for line in _time_lines(results, key)))


def _time_lines(results: Results, key: str) -> Iterator[list[str]]:
    job = results[key]
    for way in WAYS:
        found, plain = job["ways"][way], results[PLAIN]["ways"][way]
        is_first = way == WAYS[0]
        yield [
            RUNS[key].title if is_first else "",
            f"{100 * resent(job):.2g}%" if is_first else "",
            way,
            _typical(found["step"]),
            f"{_median(found['step']) / _median(plain['step']):.2f}",
            _typical(found["exchange"]),
            f"{_median(job['ways'][WAYS[0]]['step']) / _median(found['step']):.1f}",
        ]


def _typical(seconds: list[float]) -> str:
    ninth = statistics.quantiles(seconds, n=10)[-1]
    return f"{1e3 * _median(seconds):.0f} ({1e3 * ninth:.0f})"


def _median(seconds: list[float]) -> float:
    return statistics.median(seconds)


def is_same(results: Results, key: str, way: str) -> bool:
    """Whether every rank has the weights that it has without trouble.

    They are those after the last step that both jobs recorded.
    """
    marks, plain = (results[each]["ways"][way]["marks"] for each in (key, PLAIN))
    step = max(marks.keys() & plain.keys(), key=int)
    here, there = ([rank["weights"] for rank in ranks[step]] for ranks in (marks, plain))
    return here == there


def _same_weights(results: Results) -> Iterator[str]:
    troubled = [key for key in results if key != PLAIN]
    for way in WAYS:
        same = [is_same(results, key, way) for key in troubled]
        yield (
            f"- {way}: in {sum(same)} of {len(same)} jobs, the same weights as in the job without "
            "trouble."
        )


def _sooner(results: Results) -> Iterator[str]:
    """The effect of a shorter time-out, where it was measured."""
    for key in results:
        sooner = f"{key}-soon"
        if sooner in results:
            before, after = (_median(results[k]["ways"][WAYS[-1]]["step"]) for k in (key, sooner))
            yield (
                f"  With {RUNS[key].title}, this shortened a step with {WAYS[-1]} from "
                f"{1e3 * before:.0f} to {1e3 * after:.0f} ms."
            )
