"""`make bench-pay`: seconds a step of real training of 25.5 million parameters.

Hosts are network namespaces of this machine (`cluster`) with one rank each, over torch.distributed
with Gloo. The model is the transformer of `study.large` with AdamW; its backward pass is real, and
what overlaps with it does so here. All variants take turns in every round; each is built anew, and
takes a few steps that are not counted. Local steps are timed over whole rounds. The first variant
exchanges nothing: its seconds are the compute of a step. The job `whole` trains with TopKEF as the
simulated run does, and records loss and seconds. Writes docs/results/does-it-pay.json and
docs/does-it-pay.md, which joins the seconds with losses of `scripts/study/does_it_pay.toml`.

    sudo make bench-pay ARGS="1gbit --rounds 5"     # this job; other results are kept

The authors' bias: they want TopKEF and local steps to win.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.jobs import Jobs, on_ranks
from cluster import Cluster, Link
from pages.markdown import table

LIMIT_SECONDS = 3600.0  # a job
PARTS = ("compress_seconds", "exposed_seconds", "decompress_seconds")  # of a step, not compute
ALONE, FLOAT32, FLOAT16, BFLOAT16 = "compute alone", "dense", "PyTorch's float16", "bfloat16"
TOPK, SHARDED, POWERSGD, QSGD = "TopKEF", "TopKEF, sharded", "PowerSGD", "QSGD, 2 bits"
LOCAL, LOCAL_10, LATE, PLAIN = (
    "local steps",
    "local steps, 10",
    "local steps, `delay=10`",
    "local steps, `Dense()`",
)
EVERY_STEP = (ALONE, FLOAT32, FLOAT16, BFLOAT16, POWERSGD, QSGD, TOPK, SHARDED)
NEAR = (*EVERY_STEP, LOCAL, LOCAL_10)
CONVOLUTIONS = "convolutions*"
DISTANT = (ALONE, FLOAT16, BFLOAT16, TOPK, LOCAL, LOCAL_10, LATE, PLAIN)

EARLY = 60  # steps of the default's warm-up

Result = Mapping[str, list[float]]  # a list has a number of each round


@dataclass(frozen=True)
class Job:
    """Ranks on emulated hosts, and what they run."""

    rate: str  # of each host's link
    variants: tuple[str, ...] = NEAR
    hosts: int = 4
    delay: str | None = None  # from host to host
    case: str = "byte GPT*"  # of the study
    rows: int = 2  # of a rank's batch
    early: bool = False  # the first EARLY steps of a run, in which ranks send more, once
    whole: bool = False  # a training run with losses instead of timed variants


RUNS = {
    "100mbit": Job("100mbit"),
    "1gbit": Job("1gbit"),
    "10gbit": Job("10gbit", EVERY_STEP, hosts=2),
    "100mbit-early": Job("100mbit", (TOPK, SHARDED), early=True),
    "1gbit-early": Job("1gbit", (TOPK, SHARDED), early=True),
    "whole": Job("100mbit", (TOPK,), whole=True),
    "convolutions-100mbit": Job("100mbit", EVERY_STEP, case=CONVOLUTIONS),
    "convolutions-1gbit": Job("1gbit", EVERY_STEP, case=CONVOLUTIONS),
    "convolutions-100mbit-early": Job("100mbit", (TOPK, SHARDED), case=CONVOLUTIONS, early=True),
    "convolutions-1gbit-early": Job("1gbit", (TOPK, SHARDED), case=CONVOLUTIONS, early=True),
    "distant": Job("100mbit", DISTANT, delay="50ms"),
    "distant-early": Job("100mbit", (TOPK,), delay="50ms", early=True),
    "distant-1": Job("100mbit", DISTANT, delay="50ms", rows=1),
}


def measure(job: Job, args: argparse.Namespace) -> dict[str, Any]:
    """Run a job on a cluster of its own, and return its results."""
    cluster = Cluster(job.hosts, Link.of(job.rate, delay=job.delay))
    return on_ranks("does_it_pay_rank", job, args, cluster, LIMIT_SECONDS)


JOBS = Jobs("does-it-pay", RUNS, measure, {"rounds": (3, "of all variants")}, indent=1)


def computing(found: Result, alone: float) -> float:
    """The share of a step that is neither encoding, decoding nor waiting for others.

    Where a variant does not measure these, it is the share of the seconds without an exchange.
    """
    spent = [sum(parts) for parts in zip(*(found[part] for part in PARTS), strict=True)]
    if any(spent):
        shares = zip(spent, found["seconds"], strict=True)
        return 1.0 - statistics.median(each / seconds for each, seconds in shares)
    return min(1.0, alone / statistics.median(found["seconds"]))


def ranged(seconds: Sequence[float], unit: str = "") -> str:
    """Format the median of some seconds, with the least and the most."""
    return f"{statistics.median(seconds):.2f}{unit} ({min(seconds):.2f} to {max(seconds):.2f})"


def seconds_table(found: Mapping[str, Result], beside: str) -> str:
    """Tabulate the variants: seconds of a step, compute's share of it, and bytes.

    beside: the variant whose seconds the last column divides by.
    """
    medians = {name: statistics.median(each["seconds"]) for name, each in found.items()}
    lines = []
    for name, each in found.items():
        sent, exchange = (statistics.median(each[key]) for key in ("bytes", "exchange"))
        lines.append(
            [
                name,
                ranged(each["seconds"], " s"),
                f"{100 * computing(each, medians[ALONE]):.1f}%",
                "-" if name == ALONE else f"{sent / 1e6:.3g} MB",
                "-" if name == ALONE else f"{exchange / 1e6:.3g} MB",
                f"{medians[name] / medians[beside]:.2f}",
            ]
        )
    head = ["", "a step", "compute", "sent a step", "an exchange", f"times {beside}"]
    return table(head, lines)
