"""The digits in training loops as people write them: clipping, half precision, restarts, odd data.

An ordinary Horovod script, which `horovod-topk compare scripts/study/practice.toml` runs with every
compressor of docs/default.md. Each option adds one thing to the loop.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "examples"))  # the network and the data

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

import horovod_topk
from horovod_topk import checkpoint
from horovod_topk.torch import TopKEF

GROWTH_INTERVAL = 100  # steps; PyTorch's 2,000 would leave the scale as it is in so short a run
SPIKE_EVERY, SPIKE = 100, 100.0  # steps between two; how many times too large a loss is
IDLE_EVERY = 4  # steps
BATCH_SIZE = 32


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The options, of the command line or of these words."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--steps", type=int, default=1000)
    add("--lr", type=float, required=True)
    add("--optimizer", choices=("sgd", "nesterov", "adamw"), default="sgd")
    add("--precision", choices=("float32", "bfloat16", "float16"), default="float32")
    add("--clip", type=float, help="clip to this norm after the exchange, unless TopKEF clips")
    add("--spikes", action="store_true", help="the last rank's loss is too large now and then")
    add("--shards", choices=("equal", "skewed"), default="equal")
    add("--idle", action="store_true", help="the last rank has no data now and then")
    add("--restart", action="store_true", help="from a checkpoint, after half of the steps")
    return parser.parse_args(words)


class Job:
    """A model and its optimizer on this rank."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.model = DigitsCNN()
        half = args.precision == "float16"
        self.scaler = GradScaler("cpu", growth_interval=GROWTH_INTERVAL, enabled=half)
        self.compression = TopKEF(grad_scaler=self.scaler if half else None)
        self.optimizer = hvd.DistributedOptimizer(
            plain_optimizer(args, self.model),
            named_parameters=self.model.named_parameters(),
            compression=self.compression,
        )
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        self.schedule = LambdaLR(self.optimizer, harness.warmup_cosine(args.steps))
        self.overflows = 0

    def step(self, number: int, images: Tensor, labels: Tensor) -> None:
        """Steps are counted from 1."""
        self.optimizer.zero_grad()
        with self._autocast():
            loss = cross_entropy(self.model(images), labels)
        self.scaler.scale(loss.float() * weight(self.args, number)).backward()
        self.optimizer.synchronize()
        self.scaler.unscale_(self.optimizer)
        if self.args.clip is not None and self.compression.config.clip_norm is None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
        scale = self.scaler.get_scale()
        with self.optimizer.skip_synchronize():
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.overflows += self.scaler.get_scale() < scale
        self.schedule.step()

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        if self.args.precision == "float32":
            return contextlib.nullcontext()
        return torch.autocast("cpu", getattr(torch, self.args.precision))

    @property
    def parts(self) -> tuple[Any, ...]:
        """What an ordinary checkpoint has."""
        return self.model, self.optimizer, self.schedule, self.scaler

    def fingerprint(self) -> int:
        """Of the weights, to the bit: 48 bits, which a float holds."""
        weights = b"".join(p.detach().numpy().tobytes() for p in self.model.parameters())
        return int(hashlib.sha256(weights).hexdigest()[:12], 16)


def plain_optimizer(args: argparse.Namespace, model: nn.Module) -> Optimizer:
    """The optimizer before Horovod wraps it."""
    if args.optimizer == "adamw":
        return AdamW(model.parameters(), lr=args.lr)
    nesterov = args.optimizer == "nesterov"
    return SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=nesterov)


def batches(args: argparse.Namespace, seed: int) -> Iterator[tuple[Tensor, ...]]:
    """This rank's, one a step. Skewed: each rank has five or six of the ten digits."""
    images, labels = digits("training")
    rank, ranks, rows = hvd.rank(), hvd.size(), (images, labels)
    if args.shards == "skewed":
        order = labels.argsort(stable=True).tensor_split(ranks)[rank]
        rows, rank, ranks = (images[order], labels[order]), 0, 1
    source = torch_harness.batches_of(rank, ranks, *rows, batch_size=BATCH_SIZE, seed=seed)
    return (next(source) for _ in range(args.steps))


def weight(args: argparse.Namespace, number: int) -> float:
    """Of this rank's loss in a step."""
    if hvd.rank() != hvd.size() - 1:
        return 1.0
    if args.spikes and number % SPIKE_EVERY == 0:
        return SPIKE
    return 0.0 if args.idle and number % IDLE_EVERY == 0 else 1.0


def restarted(job: Job) -> Job:
    """What a new process would make of a job's checkpoint."""
    with common_folder() as folder:
        checkpoint.save(folder, TopKEF.of(job.optimizer))
        file = io.BytesIO()
        torch.save([part.state_dict() for part in job.parts], file)
        file.seek(0)
        again = Job(job.args)
        for part, state in zip(again.parts, torch.load(file, weights_only=True), strict=True):
            part.load_state_dict(state)
        checkpoint.load(folder, TopKEF.of(again.optimizer))
        hvd.barrier()
    return again


@contextlib.contextmanager
def common_folder() -> Iterator[str]:
    """One that all ranks of this machine see; rank 0 makes and removes it."""
    with contextlib.ExitStack() as stack:
        own = hvd.rank() == 0
        made = stack.enter_context(tempfile.TemporaryDirectory()) if own else None
        yield hvd.broadcast_object(made, name="folder")  # without one, named by type


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """On held-out images."""
    images, labels = digits("held-out")
    return (model(images).argmax(dim=1) == labels).double().mean().item()


def train(args: argparse.Namespace, seed: int) -> dict[str, float]:
    """What a run came to, the same on every rank."""
    torch.manual_seed(seed)
    job = Job(args)
    for number, batch in enumerate(batches(args, seed), start=1):
        job.step(number, *batch)
        if args.restart and number == args.steps // 2:
            job = restarted(job)
    prints = hvd.allgather_object(job.fingerprint())
    if len(set(prints)) > 1:
        raise RuntimeError(f"ranks ended with different weights: {prints}")
    return {"accuracy": accuracy(job.model), "weights": prints[0], "overflows": job.overflows}


def main() -> None:
    """One run, reported."""
    args = parse()
    hvd.init()
    torch.set_num_threads(1)  # sums keep their order from run to run
    horovod_topk.report(step=args.steps, **train(args, horovod_topk.seed(0)))


if __name__ == "__main__":
    main()
