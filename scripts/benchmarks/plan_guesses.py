"""Planned steps of each cell, with constants fitted on other cells, beside the measured steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.plan import DENSE, FITTED, GUESSED, NONE, STRATEGIES, Cell, Exchange
from cluster import Link
from horovod_topk.cli.models import specs_of
from horovod_topk.core.plan.nodes import Nodes
from horovod_topk.cost.collective_cost import CollectiveCost
from horovod_topk.cost.fit import Sample, fit
from horovod_topk.cost.machine import Kernels, Machine
from horovod_topk.cost.step import Training, step
from horovod_topk.cost.strategies import Strategy, compressed, dense
from horovod_topk.cost.traffic import nodes_of
from horovod_topk.methods.topk import TopK

Job = dict[str, Any]  # what a cell's ranks found, and where


@dataclass(frozen=True)
class Row:
    """A step with one exchange on one cell."""

    cell: Cell
    strategy: str
    planned: float  # seconds, without overlap
    overlapped: float  # seconds, planned with overlap
    repeats: tuple[float, ...]

    @property
    def measured(self) -> float:
        """The median."""
        return statistics.median(self.repeats)

    @property
    def error(self) -> float:
        """Of the plan without overlap, as a share of the measured time."""
        return self.off(self.planned)

    def off(self, planned: float) -> float:
        """Distance to the measured time, as a share of it."""
        return abs(planned - self.measured) / self.measured

    @property
    def spread(self) -> float:
        """Noise: the time from the fastest repeat to the slowest, over their median."""
        return (max(self.repeats) - min(self.repeats)) / self.measured


def rows(jobs: Mapping[str, Job]) -> list[Row]:
    """Rows of all measured cells."""
    machine = machine_of([jobs[cell.name] for cell in FITTED])
    measured = [cell for cell in GUESSED if cell.name in jobs]
    return [row for cell in measured for row in guesses(machine, cell, jobs[cell.name])]


def machine_of(jobs: Sequence[Job]) -> Machine:
    """Constants, fitted on the cells for fitting."""
    cores = float(jobs[0]["machine"]["cores"])
    samples = [
        Sample(CollectiveCost(**collective), took, max(1.0, cell.hosts / cores), _rate(cell))
        for cell, job in zip(FITTED, jobs, strict=True)
        for collective, took in job["samples"]
    ]
    each = [Kernels(**job["kernels"]) for job in jobs]
    names = Kernels.__dataclass_fields__
    kernels = Kernels(**{name: min(getattr(k, name) for k in each) for name in names})
    cells = ", ".join(f"{cell.hosts} hosts at {cell.rate}" for cell in FITTED)
    where = f"{jobs[0]['machine']['cpu']}, {time.strftime('%Y-%m-%d')}"
    origin = f"fitted by make plan-grid on {cells}, {where}"
    return Machine(fit(samples), kernels, cores, origin=origin)


def guesses(machine: Machine, cell: Cell, job: Job) -> Iterator[Row]:
    """A row for each exchange."""
    assert cell.model is not None
    nodes = nodes_of(cell.hosts, 1)
    network = replace(machine.network, bandwidth=_rate(cell))
    there = replace(machine, network=network, crowd=cell.hosts)
    training = Training(statistics.median(job["repeats"][NONE.name]))
    for exchange in STRATEGIES[1:]:
        strategy = _way(cell.model, exchange, nodes)
        planned, overlapped = (
            step(strategy, there, training, overlap=overlap).seconds for overlap in (False, True)
        )
        repeats = tuple(job["repeats"][exchange.name])
        yield Row(cell, exchange.name, planned, overlapped, repeats)


def _rate(cell: Cell) -> float:
    rate = Link.of(cell.rate).rate
    assert rate is not None
    return rate


def _way(model: str, exchange: Exchange, nodes: Nodes) -> Strategy:
    specs = specs_of(model)
    if exchange == DENSE:
        return dense(specs, nodes)
    return compressed(specs, nodes, exchange.exchange, TopK(ratio=0.01, **asdict(exchange)))
