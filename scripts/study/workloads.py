"""The examples as the studies train them on simulated ranks: model, loss, score, data of each rank.

`horovod-topk compare --simulated` calls `workload(**options)`. A rank's batches are half as large
as in docs/accuracy.md, whose two ranks are four here: a step sees as many examples as there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
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
from torch.optim.lr_scheduler import LambdaLR

SHARDS = ("equal", "skewed")
EVALUATIONS = 5  # of a run, evenly spaced


class Study:
    """What both tasks have in common.

    Args:
        optimizer: sgd or adamw.
        shards: equal, or skewed: what is alike lies on the same rank.
        lr: peak of the learning rate.
        steps: of a run.
        evaluate_on: held-out or validation.
    """

    batch_size: int  # of a rank

    def __init__(
        self, *, optimizer: str, shards: str, lr: float, steps: int, evaluate_on: str = "held-out"
    ) -> None:
        self.steps, self.every = steps, max(1, steps // EVALUATIONS)
        self._settings = argparse.Namespace(
            compression="none", optimizer=optimizer, lr=lr, momentum=0.0
        )
        self.shards, self.split = shards, evaluate_on

    def optimizer(self, model: nn.Module) -> Optimizer:
        """SGD with momentum, or AdamW."""
        return torch_harness.optimizer(self._settings, model)

    def schedule(self, optimizer: Optimizer) -> LambdaLR:
        """Linear warm-up, then a cosine."""
        return LambdaLR(optimizer, harness.warmup_cosine(self.steps))

    def batches(self, rank: int, ranks: int, seed: int) -> Iterator[tuple[Tensor, ...]]:
        """A rank's share of all rows, or its piece of the sorted ones."""
        rows, size = self.rows(), {"batch_size": self.batch_size, "seed": seed}
        if self.shards == "equal":
            return torch_harness.batches_of(rank, ranks, *rows, **size)
        piece = tuple(column.tensor_split(ranks)[rank] for column in rows)
        return torch_harness.batches_of(0, 1, *piece, **size)

    def rows(self) -> tuple[Tensor, ...]:
        """The training data; for skewed shards with what is alike next to each other."""
        raise NotImplementedError


class Digits(Study):
    """A CNN on digits. Skewed: each of four ranks has two or three of the ten digits."""

    batch_size = 16

    def model(self) -> nn.Module:
        """284 thousand parameters."""
        return pytorch_digits.DigitsCNN()

    def rows(self) -> tuple[Tensor, ...]:
        """Images and labels."""
        images, labels = _digits("training")
        order = torch.arange(len(labels))
        if self.shards == "skewed":
            order = labels.argsort(stable=True)
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


class ByteModel(Study):
    """A GPT on bytes of source files. Skewed: each rank reads its part of them, by name."""

    batch_size = 2

    def model(self) -> nn.Module:
        """280 thousand parameters."""
        return pytorch_bytelm.ByteGPT()

    def rows(self) -> tuple[Tensor, ...]:
        """Texts."""
        return (_library("training", by_name=self.shards == "skewed"),)

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Bits a byte."""
        return pytorch_bytelm.bits(model, *batch).mean()

    def score(self, model: nn.Module) -> dict[str, float]:
        """Bits a byte."""
        rows = pytorch_bytelm.spread_evenly(_library(self.split)).split(256)
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
def _library(split: str, *, by_name: bool = False) -> Tensor:
    files = source_files.of_split(split, source_files.STANDARD_LIBRARY)
    return pytorch_bytelm.in_rows(sorted(files) if by_name else files)
