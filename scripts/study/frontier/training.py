"""Trains one cell: the loop of the examples, with each rank's gradients in turn."""

from __future__ import annotations

import argparse
import math
import statistics
import time
from typing import Any

import harness
import torch
import torch_harness
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from study.frontier.ablated import Ablated
from study.frontier.cells import DENSE, Cell
from study.frontier.exchanges import Compressed, Dense, Exchange, counted_bytes
from study.frontier.workloads import WORKLOADS, Workload, batches

EVALUATIONS = 5  # of a run, evenly spaced


class Job:
    """P ranks that train one model, in lock-step."""

    def __init__(self, cell: Cell) -> None:
        torch.manual_seed(cell.seed)
        self.workload: Workload = WORKLOADS[cell.workload]
        self.model = self.workload.model()
        self.exchange: Exchange = exchange(self.model, cell)
        self._parameters = list(self.model.parameters())
        self._batches = batches(self.workload, cell.shards, cell.ranks, cell.seed)
        settings = argparse.Namespace(
            compression="topk", optimizer=cell.optimizer, lr=cell.lr, momentum=cell.momentum
        )
        self._optimizer = torch_harness.optimizer(settings, self.model)
        self._schedule = LambdaLR(self._optimizer, harness.warmup_cosine(cell.steps))
        if cell.follow_lr and isinstance(self.exchange, Compressed):
            self.exchange.follow(lambda: float(self._optimizer.param_groups[0]["lr"]))

    def step(self) -> None:
        """A batch on every rank, an exchange, and a step that is the same on all."""
        gradients = [self._gradients(next(source)) for source in self._batches]
        with torch.no_grad():
            mean = self.exchange.mean(gradients)
        for parameter, gradient in zip(self._parameters, mean, strict=True):
            parameter.grad = gradient
        self._optimizer.step()
        self._schedule.step()

    def _gradients(self, batch: tuple[Tensor, ...]) -> list[Tensor]:
        loss = self.workload.loss(self.model, *batch)
        return list(torch.autograd.grad(loss, self._parameters))


def exchange(model: nn.Module, cell: Cell) -> Exchange:
    """The one a cell names."""
    if cell.exchange == DENSE:
        return Dense(model, cell.ranks)
    if cell.without:
        return Ablated(model, cell.ranks, cell.config, cell.without)
    return Compressed(model, cell.ranks, cell.config)


def train(cell: Cell) -> dict[str, Any]:
    """Bytes a step and rank, and scores on unseen data. A run that diverges ends with None."""
    job, every = Job(cell), cell.steps // EVALUATIONS
    history: dict[str, list[float | None]] = {"step": [], job.workload.column: []}
    seconds = []
    for step in range(1, cell.steps + 1):
        started = time.perf_counter()
        job.step()
        seconds.append(time.perf_counter() - started)
        if step % every == 0:
            score = _score(job, cell.evaluate_on)
            history["step"].append(step)
            history[job.workload.column].append(score)
            if score is None:  # what is not finite stays so
                break
    traffic = job.exchange.traffic()
    return {
        "parameters": sum(p.numel() for p in job.model.parameters()),
        "sent_bytes": counted_bytes(traffic),
        "dense_bytes": traffic.dense_bytes,
        "ms_per_step": round(1e3 * statistics.median(seconds), 2),
        "history": history,
    }


@torch.no_grad()
def _score(job: Job, split: str) -> float | None:
    finite = all(bool(p.isfinite().all()) for p in job.model.parameters())
    score = job.workload.score(job.model, split)
    return round(score, 5) if finite and math.isfinite(score) else None
