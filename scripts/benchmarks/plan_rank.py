"""A rank of the benchmark `plan`: times collectives for the fit, or steps that the plan predicts.

On a cell for fitting, rank 0 times the kernels alone, then all ranks time collectives. On other
cells all ranks make steps, one exchange after the other. The slowest rank's time counts.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor

from benchmarks.plan import DENSE, LEAST, MOST, NONE, SETTLED, STRATEGIES, Cell, Exchange
from benchmarks.shapes import Shapes, training
from horovod_topk.cli.bench.ranks import HorovodRanks, barrier, most
from horovod_topk.cli.frameworks import Framework, find
from horovod_topk.cli.plan import kernels
from horovod_topk.cli.plan.measure import timed
from horovod_topk.cli.timing import clocked
from horovod_topk.cost.traffic import nodes_of
from horovod_topk.methods.topk import TopK
from horovod_topk.reporting import launched_rank
from horovod_topk.torch import TopKEF

LONG = 15.0  # seconds of repeats; after them, no more than the least number


def step_of(model: Shapes, strategy: Exchange) -> Callable[[], None]:
    """A training step with one exchange."""
    compression: object | None = None
    if strategy == DENSE:
        compression = hvd.Compression.none
    elif strategy != NONE:
        compression = TopKEF(ratio=0.01, warmup=None, **asdict(strategy))
    step, _ = training(model, compression, partial(model.loss, directions_of(model)))
    return step


def directions_of(model: Shapes) -> list[Tensor]:
    """Gradients of this rank; all are views of one array, to save the memory that hosts share."""
    most = max(weight.numel() for weight in model.weights)
    noise = torch.randn(most, generator=torch.Generator().manual_seed(hvd.rank()))
    return [noise[: weight.numel()].view_as(weight) for weight in model.weights]


def repeated(step: Callable[[], None], warm_up: int) -> list[float]:
    """Seconds of each step on the slowest rank; all ranks take as many steps."""
    ranks = HorovodRanks()
    for _ in range(warm_up):
        step()
    timed, taken = clocked(step, partial(barrier, ranks)), list[float]()
    while len(taken) < LEAST or (len(taken) < MOST and sum(taken) < LONG):
        taken += most(ranks, [timed()])
    return taken


def steps(name: str) -> dict[str, list[float]]:
    """Step times of each exchange; dense has one warm-up step, in which names are cached."""
    found = {}
    for strategy in STRATEGIES:
        step = step_of(Shapes(name), strategy)
        found[strategy.name] = repeated(step, warm_up=1 if strategy == DENSE else SETTLED)
        del step
        gc.collect()
    return found


def samples(framework: Framework) -> list[tuple[dict[str, Any], float]]:
    """The collectives and their times."""
    nodes = nodes_of(hvd.size(), hvd.local_size())
    return [(asdict(collective), took) for collective, took in timed(framework, nodes)]


def measure(cell: Cell, args: argparse.Namespace) -> dict[str, Any] | None:
    """Measure; rank 0 returns what it found."""
    framework = find()
    assert framework is not None, "Horovod serves no framework: horovod-topk doctor says why"
    found: dict[str, Any] = {}
    if cell.model is None and launched_rank() == 0:
        found["kernels"] = asdict(kernels.measure(framework, TopK(ratio=0.01, values="float32")))
    hvd.init()
    if cell.model is None:
        found["samples"] = samples(framework)
    else:
        found["repeats"] = steps(cell.model)
    rank = hvd.rank()
    hvd.shutdown()
    return found if rank == 0 else None
