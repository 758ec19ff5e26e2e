"""Figures of docs/network.md, from the stored results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.network import FAST, HOSTS, RATES, RUNS
from horovod_topk.cli.bench.figures import figures
from horovod_topk.cli.bench.table import times
from horovod_topk.cost import quantities
from pages import Values
from pages.markdown import table

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
    """The page's figures by name."""
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
