"""Seconds of FSDP2's hop between two nodes of two ranks: PyTorch's HSDP beside compression.

    sudo .venv/bin/python scripts/bench.py fsdp                        # all jobs
    sudo .venv/bin/python scripts/bench.py fsdp resnet50:1gbit --rounds 5

Nodes are emulated hosts. All variants take turns in every round. What a variant takes more than one
without a hop is what the hop adds to a step. Writes docs/results/fsdp.json and docs/fsdp.md.

In the job `linear` a batch of one row keeps compute small; `resnet50` computes nothing, as its
backward returns given gradients of a ResNet-50's shapes.

The authors' bias: they want compression to win.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from itertools import product
from typing import Any

from benchmarks.jobs import Jobs, on_ranks
from cluster import Cluster, Link
from pages.markdown import table

LIMIT_SECONDS = 1200.0  # a job
RANKS = 2  # of a host
WIDTH, UNITS = 1024, 24
MODELS = {
    "linear": f"{UNITS} linear units, {UNITS * WIDTH * (WIDTH + 1) / 1e6:.0f} million parameters",
    "resnet50": "The gradients of a ResNet-50, in units of 25 MiB",
}
RATES = "1gbit", "300mbit"
NONE = "no hop"
KINDS = "float32", "bfloat16"  # of HSDP's reduction

Job = tuple[str, str]  # model, and rate of the links
Found = Mapping[str, list[float]]  # seconds of every step by the variant


def measure(job: Job, args: argparse.Namespace) -> dict[str, Any]:
    """Run one job on two hosts."""
    cluster = Cluster(2, Link.of(job[1]), slots=RANKS)
    return on_ranks("fsdp_rank", job, args, cluster, LIMIT_SECONDS)


NAMED = {":".join(job): job for job in product(MODELS, RATES)}
JOBS = Jobs("fsdp", NAMED, measure, {"rounds": (9, "timed steps of each variant")}, indent=1)


def values(stored: Mapping[str, Found]) -> dict[str, str]:
    """The page's tables, one for each model."""
    rounds = {str(len(steps)) for found in stored.values() for steps in found.values()}
    gains = {f"beside_{k}": ranged([gain(f, f"HSDP, {k}") for f in stored.values()]) for k in KINDS}
    tables = (f"{words}:\n\n{shown(stored, model)}" for model, words in MODELS.items())
    return {"tables": "\n\n".join(tables), "rounds": " and ".join(sorted(rounds)), **gains}


def gain(taken: Found, beside: str) -> float:
    """How many times less the hop of TopKEF adds to a step than that of another variant."""
    other, own, base = (statistics.median(taken[name]) for name in (beside, "TopKEF()", NONE))
    return (other - base) / (own - base)


def ranged(gains: list[float]) -> str:
    """Write the range of some ratios."""
    return f"{min(gains):.0f} to {max(gains):.0f}"


def shown(stored: Mapping[str, Found], model: str) -> str:
    """A row for each variant, columns for each rate."""
    found = {rate: stored[f"{model}:{rate}"] for rate in RATES if f"{model}:{rate}" in stored}
    rows = []
    for name in next(iter(found.values())):
        row = [f"`{name}`" if "(" in name else name]
        for taken in found.values():
            median, base = (statistics.median(taken[each]) for each in (name, NONE))
            row += [f"{median:.2f} s", f"{median - base:+.2f} s"]
        rows.append(row)
    return table(["", *(f"{rate}, {w}" for rate in found for w in ("step", "the hop adds"))], rows)
