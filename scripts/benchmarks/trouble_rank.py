"""A rank of the benchmark `trouble`, alone on its host, trains with each method in turns.

Every method has its own model and optimizer, and all see the same batches. Ranks sleep in place of
a larger model's compute, so a slow rank does not depend on how busy the cores are. Digests of the
weights, every few steps, show whether trouble changed any bit.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness
import horovod.torch as hvd
import pytorch_digits
import torch
import torch_harness
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.trouble import COMPUTE, WAYS, Run
from horovod_topk.torch import TopKEF

MARK = 10  # steps between two records of weights
BATCH_SIZE, LR, SEED = 16, 0.1, 0
PLAIN = {"ratio": 0.01, "momentum": 0, "follow_lr": False, "warmup": None}
COMPRESSIONS = {
    "dense": lambda: hvd.Compression.none,
    "TopKEF": lambda: TopKEF(values="float32", **PLAIN),
    "TopKEF int8": lambda: TopKEF(values="int8", **PLAIN),
}


@dataclass
class Times:
    """Seconds of a step on this rank, one a step."""

    step: list[float] = field(default_factory=list)
    exchange: list[float] = field(default_factory=list)  # of it, from the last gradient on


class Training:
    """A model that is trained in one way."""

    def __init__(self, way: str, steps: int) -> None:
        self.way = way
        torch.manual_seed(SEED)
        self.model = pytorch_digits.DigitsCNN()
        plain = torch.optim.SGD(self.model.parameters(), lr=LR, momentum=0.9)
        self._optimizer = hvd.DistributedOptimizer(
            plain,
            named_parameters=[(f"{way}.{n}", p) for n, p in self.model.named_parameters()],
            compression=COMPRESSIONS[way](),
        )
        self._schedule = LambdaLR(self._optimizer, harness.warmup_cosine(steps))
        data = pytorch_digits.digits("training")
        self._batches = torch_harness.batches(*data, batch_size=BATCH_SIZE, seed=SEED)
        self.times, self.marks = Times(), dict[int, dict[str, str]]()

    def step(self, compute: float) -> None:
        """One step, which all ranks begin together."""
        images, labels = next(self._batches)
        self._optimizer.zero_grad()
        hvd.barrier()
        began = time.perf_counter()
        time.sleep(compute)
        cross_entropy(self.model(images), labels).backward()
        ready = time.perf_counter()
        self._optimizer.synchronize()
        done = time.perf_counter()
        with self._optimizer.skip_synchronize():
            self._optimizer.step()
        self._schedule.step()
        self.times.step.append(time.perf_counter() - began)
        self.times.exchange.append(done - ready)

    def mark(self, step: int) -> None:
        """Note where training stands."""
        self.marks[step] = {"weights": digest(self.model.parameters())}

    def found(self) -> dict[str, Any]:
        """Of all ranks; call it on every one."""
        ranks = hvd.allgather_object((self.times, self.marks), name=f"found.{self.way}")
        return {
            "step": _short(map(max, zip(*(times.step for times, _ in ranks), strict=True))),
            # Of the rank that came last.
            "exchange": _short(map(min, zip(*(t.exchange for t, _ in ranks), strict=True))),
            "marks": {step: [marks[step] for _, marks in ranks] for step in self.marks},
        }


def _short(seconds: Iterable[float]) -> list[float]:
    return [round(each, 5) for each in seconds]


def digest(tensors: Iterable[Tensor]) -> str:
    """Of every bit."""
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().contiguous().numpy().tobytes())
    return total.hexdigest()[:16]


def segments() -> dict[str, int]:
    """TCP segments that this host has sent, and sent again."""
    names, values = (
        line.split()[1:]
        for line in Path("/proc/net/snmp").read_text().splitlines()
        if line.startswith("Tcp:")
    )
    counters = dict(zip(names, map(int, values), strict=True))
    return {"sent": counters["OutSegs"], "resent": counters["RetransSegs"]}


def turns(limit_seconds: float, steps: int, compute: float) -> list[Training]:
    """Train in every way, a step each in turns, until all steps are done or time is up."""
    trainings = [Training(way, steps) for way in WAYS]
    began = time.monotonic()
    for step in range(1, steps + 1):
        first = step % len(trainings)
        for training in trainings[first:] + trainings[:first]:
            training.step(compute)
        if step % MARK == 0:
            for training in trainings:
                training.mark(step)
            late = torch.tensor(float(time.monotonic() - began > limit_seconds))
            if hvd.broadcast(late, root_rank=0, name="late"):
                break
    return trainings


def measure(run: Run, args: argparse.Namespace) -> dict[str, Any] | None:
    """Train with all methods; rank 0 returns what all ranks found."""
    torch.set_num_threads(1)
    hvd.init()
    before = segments()
    is_slow = hvd.rank() == hvd.size() - 1
    trainings = turns(run.limit_seconds, args.steps, COMPUTE * (run.slow if is_slow else 1))
    after = segments()
    mine = {key: after[key] - before[key] for key in after}
    everyone = hvd.allgather_object(mine, name="segments")
    ways = {training.way: training.found() for training in trainings}
    return {"segments": everyone, "ways": ways} if hvd.rank() == 0 else None
