"""`make plan-grid`: `horovod-topk plan` against measured steps, constants fitted on other cells.

The hosts of a cell are network namespaces of this machine (`cluster`) with one rank each. They
share this machine's cores. On the cells for fitting, collectives are timed. On the others, steps
are timed: without exchange (the plan's compute time), dense, and TopKEF (`plan_rank`). Writes
docs/results/plan-grid.json and docs/network.md.

    sudo make plan-grid                                # all cells: an hour and a half
    sudo make plan-grid ARGS="--missing"               # cells without results
    sudo make plan-grid ARGS="2:100mbit:resnet18 3:200mbit:fit"

The authors' bias: they want the plan to be right. Cells and models were given before anything was
measured, and all of them are reported.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pages
from benchmarks.jobs import Jobs, on_ranks
from cluster import Cluster, Link
from horovod_topk.cli.machine import machine
from horovod_topk.cli.models import MODELS
from horovod_topk.cost import machine as machines

LIMIT_SECONDS = 1800.0  # a cell
HOSTS = (2, 4, 8)
RATES = ("100mbit", "300mbit", "1gbit")
LEAST, MOST = 3, 15  # repeats of a step
SETTLED = 10  # warm-up steps: memory is touched, residuals fill, thresholds settle


@dataclass(frozen=True)
class Cell:
    """Number of hosts, rate of their links, and the model whose gradients they exchange."""

    hosts: int
    rate: str
    model: str | None = None  # None: a cell for fitting constants

    @property
    def name(self) -> str:
        """As on the command line."""
        return f"{self.hosts}:{self.rate}:{self.model or 'fit'}"


FITTED = (Cell(3, "200mbit"), Cell(6, "200mbit"), Cell(3, "600mbit"))
GUESSED = tuple(Cell(hosts, rate, model) for model, rate, hosts in product(MODELS, RATES, HOSTS))
CELLS = {cell.name: cell for cell in (*FITTED, *GUESSED)}


@dataclass(frozen=True)
class Exchange:
    """Settings of TopKEF, or what stands for none and for dense."""

    exchange: str
    values: str

    @property
    def name(self) -> str:
        """As `horovod_topk.cost.strategies` calls it."""
        return f"{self.exchange} {self.values}".strip()


NONE, DENSE = Exchange("none", ""), Exchange("allreduce", "float32")
STRATEGIES = (NONE, DENSE, Exchange("allgather", "float32"), Exchange("sharded", "int8"))


def measure(cell: Cell, args: argparse.Namespace) -> dict[str, Any]:
    """Measure a cell."""
    there = machine()  # its load: before
    cluster = Cluster(cell.hosts, Link.of(cell.rate))
    return on_ranks("plan_rank", cell, args, cluster, LIMIT_SECONDS) | {"machine": there}


OPTIONS = {"machine": ("", "a file for the fitted constants, of ranks with a core each")}
JOBS = Jobs("plan-grid", CELLS, measure, OPTIONS)


def main(args: argparse.Namespace) -> int:
    """Measure and write; the exit status."""
    status = JOBS.main(args)
    if args.machine and not status:
        from benchmarks.plan_page import machine_of

        jobs = pages.stored(JOBS.page)
        fitted = machine_of([jobs[c.name] for c in FITTED])
        machines.write(replace(fitted, cores=None), Path(args.machine))
    return status
