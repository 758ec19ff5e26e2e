"""Trains one cell on simulated ranks, in this process."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from horovod_topk.cli.compare.records import DONE, LATE, STOPPED, Cell, Point, Record
from horovod_topk.cli.compare.simulated.exchanges import (
    Dense,
    Exchange,
    Part,
    Several,
    compressed,
    counted_bytes,
)
from horovod_topk.cli.compare.simulated.local import LocalJob
from horovod_topk.cli.compare.simulated.workload import Workload, load, scored
from horovod_topk.cli.machine import machine
from horovod_topk.core.run.substitute import Substitute
from horovod_topk.local.call import LocalCall, parse


@dataclass(frozen=True)
class Task:
    """A cell, and everything that is needed to train it."""

    cell: Cell
    script: Path
    ranks: int
    options: tuple[tuple[str, Any], ...]  # arguments of `workload()`
    limit_seconds: float


class Job:
    """P simulated ranks that train one model, in lock-step."""

    def __init__(self, workload: Workload, compressor: Substitute, ranks: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.workload, self.ranks = workload, ranks
        self.model: nn.Module = workload.model()
        found = workload.optimizer(self.model)
        self._optimizers = found if isinstance(found, list) else [found]
        self.exchange: Exchange = exchange(self.model, self._optimizers, compressor, ranks)
        self._schedules = [workload.schedule(each) for each in self._optimizers]
        self._parameters = list(self.model.parameters())
        self._clip_norm: float | None = getattr(workload, "clip_norm", None)
        self.traffic = Counter[str]()  # bytes so far: sent, and those of a dense ring allreduce
        self._batches: list[Iterator[Any]] = [
            workload.batches(rank, ranks, seed) for rank in range(ranks)
        ]

    def step(self) -> None:
        """Make a step: a batch on every rank, an exchange, and the same update on all ranks."""
        found = [self._gradients(next(source)) for source in self._batches]
        with torch.no_grad():
            mean = self.exchange.mean([gradients for _, gradients in found])
        self.exchange.report([loss for loss, _ in found])
        for parameter, gradient in zip(self._parameters, mean, strict=True):
            parameter.grad = gradient
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
        for optimizer in self._optimizers:
            optimizer.step()
        for schedule in self._schedules:
            if schedule is not None:
                schedule.step()
        traffic = self.exchange.traffic()
        self.traffic.update(sent=counted_bytes(traffic), dense=traffic.dense_bytes)

    def finish(self) -> None:
        """End training: all ranks have the same weights already."""

    def score(self) -> dict[str, float | None]:
        """Metrics by name; all None if a metric or a weight is not finite."""
        return scored(self.workload, self.model)

    def _gradients(self, batch: Any) -> tuple[float, list[Tensor]]:
        loss = self.workload.loss(self.model, batch)
        return loss.item(), list(torch.autograd.grad(loss, self._parameters))


def exchange(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    compressor: Substitute,
    ranks: int,
) -> Exchange:
    """Make the exchange of a model's gradients; it may adapt the optimizers' steps."""
    if compressor.is_horovods:
        return Dense(model, ranks, torch.float16 if compressor.name == "fp16" else None)
    if len(optimizers) == 1:
        return compressed(model, optimizers[0], ranks, compressor)
    parts = [Part(model, each) for each in optimizers]
    pairs = zip(parts, optimizers, strict=True)
    return Several(model, parts, [compressed(*pair, ranks, compressor) for pair in pairs])


def job_of(
    workload: Workload, asked: Substitute | LocalCall, ranks: int, seed: int
) -> Job | LocalJob:
    """Make a job that exchanges in every step, or one of local steps."""
    if isinstance(asked, LocalCall):
        return LocalJob(workload, asked, ranks, seed)
    return Job(workload, asked, ranks, seed)


def train(task: Task, go_on: Callable[[Point], bool] = lambda _: True) -> Record:
    """Train a cell; a run that diverges ends at once.

    go_on: called with each score but the last; if it returns False, the run is stopped.
    """
    workload = load(task.script)(**dict(task.options))
    job = job_of(workload, parse(task.cell.compressor), task.ranks, task.cell.seed)
    points: list[Point] = []
    began = time.perf_counter()
    status = DONE
    for step in range(1, workload.steps + 1):
        job.step()
        if step == workload.steps:
            job.finish()
        seconds = time.perf_counter() - began
        if step % workload.every == 0 or step == workload.steps:
            points.append(Point(step, round(seconds, 3), job.score()))
            if None in points[-1].metrics.values():  # diverged: more steps cannot help
                break
            if step < workload.steps and not go_on(points[-1]):
                status = STOPPED
                break
        if seconds > task.limit_seconds:
            status = LATE
            break
    record = Record(task.cell, status, points=tuple(points), machine=machine())
    means = {kind: total / step for kind, total in job.traffic.items()}
    return replace(record, sent_bytes=means["sent"], dense_bytes=means["dense"])
