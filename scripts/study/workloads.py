"""The examples as the studies train them on simulated ranks: model, loss, score, data of each rank.

`horovod-topk compare --simulated` calls `workload(**options)`. A rank's batches are half as large
as in docs/default.md, whose two ranks are four here: a step sees as many examples as there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "examples"))  # their models, data and schedules

import harness
import pytorch_bytelm
import pytorch_digits
import source_files
import torch
import torch_harness
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

EVALUATIONS = 5  # of a run, evenly spaced


class Study:
    """A model, its data and its training loop.

    Args:
        optimizer: sgd, momentum, nesterov, adam or adamw, as the loop knows it.
        lr: peak of the learning rate, which rises for a twentieth of the steps, then falls as a
            cosine.
        steps: of a run.
        shards: equal, or skewed: what is alike lies on the same rank.
        clip_norm: to clip exchanged gradients to; 0: not at all.
        evaluate_on: held-out or validation.
    """

    model: Callable[[], nn.Module]
    batch_size: int  # rows of a rank

    def __init__(
        self,
        *,
        optimizer: str,
        lr: float,
        steps: int,
        shards: str = "equal",
        clip_norm: float = 0.0,
        evaluate_on: str = "held-out",
    ) -> None:
        self.steps, self.every = steps, max(1, steps // EVALUATIONS)
        self.clip_norm: float | None = clip_norm or None
        self.split, self.skewed = evaluate_on, shards == "skewed"
        self._kind, self._lr = optimizer, lr

    def schedule(self, optimizer: Optimizer) -> LRScheduler:
        """Linear warm-up, then a cosine."""
        return LambdaLR(optimizer, harness.warmup_cosine(self.steps))

    def columns(self, split: str) -> tuple[Tensor, ...]:
        """The data; for skewed shards with what is alike next to each other."""
        raise NotImplementedError


class Example(Study):
    """An example, whose ranks read all rows in turn."""

    def optimizer(self, model: nn.Module) -> Optimizer:
        """SGD with momentum, or AdamW."""
        settings = {"compression": "none", "optimizer": self._kind, "lr": self._lr, "momentum": 0.0}
        return torch_harness.optimizer(argparse.Namespace(**settings), model)

    def batches(self, rank: int, ranks: int, seed: int) -> Iterator[tuple[Tensor, ...]]:
        """A rank's share of all rows, or its piece of the sorted ones."""
        rows, size = self.columns("training"), {"batch_size": self.batch_size, "seed": seed}
        if not self.skewed:
            return torch_harness.batches_of(rank, ranks, *rows, **size)
        piece = tuple(column.tensor_split(ranks)[rank] for column in rows)
        return torch_harness.batches_of(0, 1, *piece, **size)


class Digits(Example):
    """A CNN on digits. Skewed: each of four ranks has two or three of the ten digits."""

    model, batch_size = pytorch_digits.DigitsCNN, 16  # 284 thousand parameters

    def columns(self, split: str) -> tuple[Tensor, ...]:
        """Images and labels."""
        images, labels = _digits(split)
        order = labels.argsort(stable=True) if self.skewed else torch.arange(len(labels))
        return images[order], labels[order]

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Cross entropy."""
        images, labels = batch
        return cross_entropy(model(images), labels)

    def score(self, model: nn.Module) -> dict[str, float]:
        """Share of images that are recognised, and cross entropy."""
        images, labels = _digits(self.split)
        scores = model(images)
        accuracy = (scores.argmax(dim=1) == labels).double().mean().item()
        return {"accuracy": accuracy, "loss": cross_entropy(scores, labels).item()}


class ByteModel(Example):
    """A GPT on bytes of source files. Skewed: each rank reads its part of them, by name."""

    model, batch_size = pytorch_bytelm.ByteGPT, 2  # 280 thousand parameters

    def columns(self, split: str) -> tuple[Tensor, ...]:
        """Texts."""
        return (library(split, by_name=self.skewed),)

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Bits a byte."""
        return pytorch_bytelm.bits(model, *batch).mean()

    def score(self, model: nn.Module) -> dict[str, float]:
        """Bits a byte."""
        rows = pytorch_bytelm.spread_evenly(library(self.split)).split(256)
        bits = torch.cat([pytorch_bytelm.bits(model, each) for each in rows])
        return {"bits_per_byte": bits.double().mean().item()}


TASKS = {"digits": Digits, "bytelm": ByteModel}


def workload(*, task: str, **options: Any) -> Study:
    """A task with its options, for `horovod-topk compare --simulated`."""
    return TASKS[task](**options)


@cache
def _digits(split: str) -> tuple[Tensor, Tensor]:
    return pytorch_digits.digits(split)


@cache
def library(split: str, *, by_name: bool = False) -> Tensor:
    """Return rows of bytes of the standard library's sources, sorted by file name if asked."""
    files = source_files.of_split(split, source_files.STANDARD_LIBRARY)
    return pytorch_bytelm.in_rows(sorted(files) if by_name else files)
