"""A trial on real ranks: an ordinary Horovod training loop, and what a trial adds to it."""

from __future__ import annotations

import contextlib
import hashlib
import io
import tempfile
from collections.abc import Iterator
from typing import Any

import harness
import horovod.torch as hvd
import torch
import torch_harness
from pytorch_digits import DigitsCNN, digits
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from horovod_topk import checkpoint
from horovod_topk.torch import TopKEF
from study.frontier.workloads import WORKLOADS
from study.practice import agenda
from study.practice.agenda import Loop, Trial

GROWTH_INTERVAL = 100  # steps; PyTorch's 2,000 would leave the scale as it is in so short a run


class Job:
    """A model and its optimizer on this rank."""

    def __init__(self, trial: Trial, lr: float) -> None:
        self.loop = trial.loop
        self.model = DigitsCNN()
        half = self.loop.precision == "float16"
        self.scaler = GradScaler("cpu", growth_interval=GROWTH_INTERVAL, enabled=half)
        self.optimizer = hvd.DistributedOptimizer(
            _optimizer(self.loop, self.model, lr),
            named_parameters=self.model.named_parameters(),
            compression=_compression(trial, self.scaler),
        )
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        self.schedule = LambdaLR(self.optimizer, harness.warmup_cosine(agenda.STEPS))
        self.overflows = 0

    def step(self, number: int, images: Tensor, labels: Tensor) -> None:
        """Steps are counted from 1."""
        self.optimizer.zero_grad()
        with self._autocast():
            loss = cross_entropy(self.model(images), labels)
        self.scaler.scale(loss.float() * _weight(self.loop, number)).backward()
        self.optimizer.synchronize()
        self.scaler.unscale_(self.optimizer)
        if self.loop.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), agenda.NORM)
        scale = self.scaler.get_scale()
        with self.optimizer.skip_synchronize():
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.overflows += self.scaler.get_scale() < scale
        self.schedule.step()

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        if self.loop.precision == "float32":
            return contextlib.nullcontext()
        return torch.autocast("cpu", getattr(torch, self.loop.precision))

    @property
    def parts(self) -> tuple[Any, ...]:
        """What an ordinary checkpoint has."""
        return self.model, self.optimizer, self.schedule, self.scaler

    def fingerprint(self) -> str:
        """Of the weights, to the bit."""
        weights = b"".join(p.detach().numpy().tobytes() for p in self.model.parameters())
        return hashlib.sha256(weights).hexdigest()[:16]


def train(trial: Trial, lr: float) -> dict[str, Any]:
    """What a run came to, the same on every rank.

    Raises:
        RuntimeError: ranks ended with different weights.
    """
    torch.manual_seed(trial.seed)
    job = Job(trial, lr)
    for number, batch in enumerate(_batches(trial), start=1):
        job.step(number, *batch)
        if trial.way and trial.way.restart and number == agenda.RESTART_AT:
            job = _restarted(job, trial, lr)
    prints = hvd.allgather_object(job.fingerprint())
    if len(set(prints)) > 1:
        raise RuntimeError(f"{trial}: ranks ended with different weights: {prints}")
    found = {"accuracy": _accuracy(job.model), "weights": prints[0], "overflows": job.overflows}
    return found | _traffic(trial, job)


def _traffic(trial: Trial, job: Job) -> dict[str, Any]:
    dense = torch_harness.allreduce_bytes(job.model, "none")
    sent = TopKEF.of(job.optimizer).stats().sent_bytes if trial.way else dense
    return {"sent_bytes": sent, "dense_bytes": dense}


def _optimizer(loop: Loop, model: nn.Module, lr: float) -> Optimizer:
    if loop.optimizer == "adamw":
        return AdamW(model.parameters(), lr=lr)
    return SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=loop.optimizer == "nesterov")


def _compression(trial: Trial, scaler: GradScaler) -> Any:
    if trial.way is None:
        return hvd.Compression.none
    scaled = {"grad_scaler": scaler} if scaler.is_enabled() else {}
    return TopKEF(ratio=trial.ratio, **scaled, **trial.way.settings)


def _batches(trial: Trial) -> Iterator[tuple[Tensor, ...]]:
    """This rank's, one a step."""
    rank, ranks, rows = hvd.rank(), hvd.size(), WORKLOADS["digits"].rows(trial.loop.shards)
    if trial.loop.shards == "skewed":
        rows, rank, ranks = tuple(each.tensor_split(ranks)[rank] for each in rows), 0, 1
    size, seed = agenda.BATCH_SIZE, trial.seed
    source = torch_harness.batches_of(rank, ranks, *rows, batch_size=size, seed=seed)
    return (next(source) for _ in range(agenda.STEPS))


def _weight(loop: Loop, number: int) -> float:
    """Of this rank's loss in a step."""
    if hvd.rank() != hvd.size() - 1:
        return 1.0
    if loop.spikes and number % agenda.SPIKE_EVERY == 0:
        return agenda.SPIKE
    return 0.0 if loop.idle and number % agenda.IDLE_EVERY == 0 else 1.0


def _restarted(job: Job, trial: Trial, lr: float) -> Job:
    """What a new process would make of a job's checkpoint."""
    with _common_folder() as folder:
        checkpoint.save(folder, TopKEF.of(job.optimizer))
        file = io.BytesIO()
        torch.save([part.state_dict() for part in job.parts], file)
        file.seek(0)
        again = Job(trial, lr)
        for part, state in zip(again.parts, torch.load(file, weights_only=True), strict=True):
            part.load_state_dict(state)
        checkpoint.load(folder, TopKEF.of(again.optimizer))
        hvd.barrier()
    return again


@contextlib.contextmanager
def _common_folder() -> Iterator[str]:
    """One that all ranks of this machine see; rank 0 makes and removes it."""
    with contextlib.ExitStack() as stack:
        own = hvd.rank() == 0
        made = stack.enter_context(tempfile.TemporaryDirectory()) if own else None
        yield hvd.broadcast_object(made, name="folder")  # without one, named by type


@torch.no_grad()
def _accuracy(model: nn.Module) -> float:
    images, labels = digits("held-out")
    return round((model(images).argmax(dim=1) == labels).double().mean().item(), 5)
