"""`make bench-network`: step times of TopKEF, Horovod and torch DDP at several bandwidths.

Hosts are network namespaces of this machine (`cluster`) with one rank each. They run
`horovod-topk bench` once for each bandwidth, and at the fastest bandwidth once for each kind of
simulated backward. Writes docs/results/network.json, docs/network.md and a picture.

    sudo make bench-network                           # all runs: half an hour
    sudo make bench-network ARGS="1gbit --rounds 5"   # these runs; other results are kept

The authors' bias: they want TopKEF to win. All methods take turns within each run.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.jobs import Jobs, on_hosts
from cluster import Cluster, Link
from horovod_topk.cli.bench.figures import figures
from horovod_topk.cli.bench.table import times
from horovod_topk.cost import quantities
from pages import Values
from pages.markdown import table

LIMIT_SECONDS = 1800.0  # a run
HOSTS = 4
MODEL = "resnet50"
RATES = ("100mbit", "300mbit", "1gbit")
FAST = RATES[-1]
BASELINES = ("dense", "dense-waiting", "fp16", "ddp", "ddp-none", "ddp-fp16", "powersgd")
OURS = ("topk", "topk-sharded", "topk-int8-0.01", "topk-plain-float32-0.01", "ddp+topk")
METHODS = (*BASELINES, *OURS)
FEW = ("dense", "fp16", "ddp", "ddp-none", "powersgd", "topk", "ddp+topk")  # at one bandwidth
# Every compressor of docs/methods.md; in two runs, as each compressor needs memory for gradients.
SPARSE = (
    "ddp",
    "ddp-fp16",
    "powersgd",
    "PowerSGD(rank=4)",
    "ddp+PowerSGD(rank=4)",
    "TopKEF()",
    "TopKEF(ratio=0.11)",
    "Threshold()",
    "RandomK(ratio=0.056)",
)
QUANTISED = (
    "ddp",
    "Dense(values='bfloat16')",
    "SignSGD()",
    "SignSGD(exchange='sharded')",
    "OneBit()",
    "TernGrad(exchange='sharded')",
    "QSGD(bits=2,exchange='sharded')",
    "QSGD(bits=4,exchange='sharded')",
    "ByteGrad(exchange='sharded')",
)


@dataclass(frozen=True)
class Run:
    """One job of `horovod-topk bench`."""

    title: str
    rate: str  # of each host's link
    methods: tuple[str, ...] = METHODS
    compute: str | None = None  # simulated backward

    @property
    def arguments(self) -> list[str]:
        """Arguments of `horovod-topk bench`, without the path of its results."""
        found = ["--model", MODEL, "--rate", self.rate, "--methods", ",".join(self.methods)]
        return [*found, "--compute", self.compute] if self.compute else found


RUNS = {
    "100mbit": Run("100 Mbit/s a host", "100mbit"),
    "300mbit": Run("300 Mbit/s a host", "300mbit"),
    "1gbit": Run("1 Gbit/s a host", "1gbit"),
    "sleep": Run("Backward that leaves the cores free", FAST, FEW, compute="sleep:0.5"),
    "cpu": Run("Backward that needs the cores", FAST, FEW, compute="cpu:0.25"),
    "sparse-100mbit": Run("Sparse and low-rank methods, 100 Mbit/s a host", "100mbit", SPARSE),
    "sparse-1gbit": Run("Sparse and low-rank methods, 1 Gbit/s a host", FAST, SPARSE),
    "quantised-100mbit": Run("Quantising methods, 100 Mbit/s a host", "100mbit", QUANTISED),
    "quantised-1gbit": Run("Quantising methods, 1 Gbit/s a host", FAST, QUANTISED),
}


def measure(run: Run, args: argparse.Namespace) -> dict[str, Any]:
    """Run `horovod-topk bench` on a cluster, and return its results."""
    command = ["-m", "horovod_topk.cli", "bench", *run.arguments, "--rounds", args.rounds]
    return on_hosts(command, Cluster(HOSTS, Link.of(run.rate)), LIMIT_SECONDS)


OPTIONS = {"rounds": (5, "timed steps of each method")}
JOBS = Jobs("network", RUNS, measure, OPTIONS, indent=1)

OVER_DDP = "ddp+topk"  # TopKEF's default
BESIDE = ("ddp-fp16", "powersgd")
AT_BACKWARD = ("ddp", "powersgd", "topk", "ddp+topk")
SETTINGS = ("topk", "topk-sharded", "topk-int8-0.01", "topk-plain-float32-0.01")

Result = dict[str, Any]
Results = dict[str, Result]  # key of RUNS -> what `horovod-topk bench --json` wrote

SHOWN = {
    "dense-waiting": "Horovod dense, sleeping",
    "ddp": "DDP dense",
    "ddp-fp16": "DDP fp16",
    "dense": "Horovod dense",
    "fp16": "Horovod fp16",
    "powersgd": "DDP PowerSGD rank 4",
    "topk": "TopKEF with Horovod",
    OVER_DDP: "TopKEF with DDP",
}


def values(results: Results) -> Values:
    """Return the figures that the page shows, by name."""
    return {
        "hosts": HOSTS,
        "cores": results[FAST]["machine"]["cores"],
        "fast": quantities.rate(results[FAST]["rate"]),
        "summary": _summary(results),
        "time": _time(results[FAST]),
        "settings": _exchanges(results, SETTINGS, RATES),
        "backward": _exchanges(results, AT_BACKWARD, ("sleep", "cpu")),
    }


def _summary(results: Results) -> str:
    """Table of the exchange times of default TopKEF and of the baselines, a row for each link."""
    header = ["link", *SHOWN.values(), *(f"DDP: TopKEF beside {SHOWN[name]}" for name in BESIDE)]
    found = {rate: figures(results[rate]) for rate in RATES if rate in results}
    lines = (
        [
            quantities.rate(results[rate]["rate"]),
            *(f"{methods[name].exchange:.2f}" for name in SHOWN),
            *(times(methods[OVER_DDP].faster(methods[name])) for name in BESIDE),
        ]
        for rate, methods in found.items()
    )
    return table(header, lines)


def _time(result: Result) -> str:
    found, cores = figures(result), result["machine"]["cores"]
    rows = (
        [
            words,
            f"{found[name].exchange:.2f}",
            f"{result['ranks'] * (found[name].cpu or 0) / cores:.2f}",
            f"{8 * (found[name].bytes or 0) / result['rate']:.2f}",
        ]
        for name, words in SHOWN.items()
    )
    return table(("", "exchange, s", "cores busy, s", "bytes on the link, s"), rows)


def _exchanges(results: Results, names: Sequence[str], runs: Sequence[str]) -> str:
    found = [figures(results[run]) for run in runs]
    rows = ([f"`{name}`", *(f"{of[name].exchange:.2f}" for of in found)] for name in names)
    return table(["", *(RUNS[run].title for run in runs)], rows)
