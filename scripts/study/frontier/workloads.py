"""The examples as the study trains them: model, loss, score, and what each rank reads.

A rank's batches are half as large as in docs/accuracy.md, whose two ranks are four here: a step
sees as many examples as there.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Protocol

import pytorch_bytelm
import pytorch_digits
import source_files
import torch
import torch_harness
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

SHARDS = ("equal", "skewed")


class Workload(Protocol):
    """Both of the below."""

    name: str  # on the command line, and of the file with its results
    example: str  # the script whose model and data these are
    column: str  # its score
    higher_is_better: bool
    batch_size: int  # of a rank

    def model(self) -> nn.Module:
        """A new one, from PyTorch's generator."""
        ...

    def rows(self, shards: str) -> tuple[Tensor, ...]:
        """The training data; for skewed shards with what is alike next to each other."""
        ...

    def loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """The mean over a batch."""
        ...

    def score(self, model: nn.Module, split: str) -> float:
        """The mean over a split that is not trained on."""
        ...


class Digits:
    """Skewed: each rank has two or three of the ten digits."""

    name, example = "digits", "examples/pytorch_digits.py"
    column, higher_is_better = "accuracy", True
    batch_size = 16

    def model(self) -> nn.Module:
        """`Workload.model`."""
        return pytorch_digits.DigitsCNN()

    def rows(self, shards: str) -> tuple[Tensor, ...]:
        """`Workload.rows`."""
        images, labels = _digits("training")
        order = labels.argsort(stable=True) if shards == "skewed" else torch.arange(len(labels))
        return images[order], labels[order]

    def loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """`Workload.loss`."""
        images, labels = batch
        return cross_entropy(model(images), labels)

    def score(self, model: nn.Module, split: str) -> float:
        """`Workload.score`."""
        images, labels = _digits(split)
        return (model(images).argmax(dim=1) == labels).double().mean().item()


class ByteModel:
    """Skewed: each rank reads a quarter of the standard library's files, in the order of names."""

    name, example = "bytelm", "examples/pytorch_bytelm.py"
    column, higher_is_better = "bits_per_byte", False
    batch_size = 2

    def model(self) -> nn.Module:
        """`Workload.model`."""
        return pytorch_bytelm.ByteGPT()

    def rows(self, shards: str) -> tuple[Tensor, ...]:
        """`Workload.rows`."""
        return (_library("training", by_name=shards == "skewed"),)

    def loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """`Workload.loss`."""
        return pytorch_bytelm.bits(model, *batch).mean()

    def score(self, model: nn.Module, split: str) -> float:
        """`Workload.score`."""
        rows = pytorch_bytelm.spread_evenly(_library(split)).split(256)
        return torch.cat([pytorch_bytelm.bits(model, each) for each in rows]).double().mean().item()


WORKLOADS: dict[str, Workload] = {each.name: each for each in (Digits(), ByteModel())}


def batches(
    workload: Workload, shards: str, ranks: int, seed: int
) -> list[Iterator[tuple[Tensor, ...]]]:
    """Each rank's endless batches: of its share of all rows, or of one piece of the sorted ones."""
    rows = workload.rows(shards)
    size = {"batch_size": workload.batch_size, "seed": seed}
    if shards == "equal":
        return [torch_harness.batches_of(rank, ranks, *rows, **size) for rank in range(ranks)]
    pieces = zip(*(column.tensor_split(ranks) for column in rows), strict=True)
    return [torch_harness.batches_of(0, 1, *piece, **size) for piece in pieces]


@cache
def _digits(split: str) -> tuple[Tensor, Tensor]:
    return pytorch_digits.digits(split)


@cache
def _library(split: str, *, by_name: bool = False) -> Tensor:
    files = source_files.of_split(split, source_files.STANDARD_LIBRARY)
    return pytorch_bytelm.in_rows(sorted(files) if by_name else files)
