"""Six models in the training loops of the study of the default setting, on simulated ranks.

`horovod-topk compare --simulated` calls `workload(**options)`. Five models predict the next byte of
the sources of Python's standard library, which are split by file; one tells from which part of two
photographs a patch is, and no patch of a held-out tile is trained on.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator, Mapping
from functools import cache, partial
from math import log
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, AdamW, Optimizer

sys.path.append(str(Path(__file__).parents[1]))

from study.networks import CausalConvolutions, Perceptron, Recurrent, Residual
from study.workloads import Study, library, pytorch_bytelm

TILE, PATCH = 32, 16  # pixels
CELLS = 4, 4  # parts of a photograph, each a class


class Loop(Study):
    """A training loop as it is common, on random rows."""

    sgd: Mapping[str, Any] = {"momentum": 0.9, "weight_decay": 5e-4}  # arguments of SGD
    adamw: Mapping[str, Any] = {}  # and of AdamW

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Return Adam, AdamW, or SGD with momentum."""
        if self._kind == "adam":
            return Adam(model.parameters(), lr=self._lr)
        if self._kind == "adamw":
            return AdamW(model.parameters(), lr=self._lr, **self.adamw)
        nesterov = {"momentum": False, "nesterov": True}[self._kind]
        return SGD(model.parameters(), lr=self._lr, nesterov=nesterov, **self.sgd)

    def batches(self, rank: int, ranks: int, seed: int) -> Iterator[tuple[Tensor, ...]]:
        """Random rows of all, or of a rank's piece of the sorted ones."""
        columns, generator = self.columns("training"), torch.Generator()
        generator.manual_seed(1000 * seed + rank)
        first, last = 0, len(columns[0])
        if self.skewed:
            first, last = last * rank // ranks, last * (rank + 1) // ranks
        while True:
            rows = torch.randint(first, last, (self.batch_size,), generator=generator)
            yield tuple(column[rows] for column in columns)

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Return the loss of a batch, which training minimises."""
        raise NotImplementedError

    def score(self, model: nn.Module) -> dict[str, float]:
        """Return the metrics of a model on held-out data, by name."""
        raise NotImplementedError


class Text(Loop):
    """Predicts the next byte."""

    length = 65  # bytes of a row

    def columns(self, split: str) -> tuple[Tensor, ...]:
        """Rows of text; sorted by name of the file for skewed shards."""
        return (library(split, by_name=self.skewed)[:, : self.length],)

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Nats a byte."""
        (text,) = batch
        return cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    def score(self, model: nn.Module) -> dict[str, float]:
        """Bits a byte."""
        rows = pytorch_bytelm.spread_evenly(*self.columns(self.split), most=256)
        nats = sum(self.loss(model, (part,)).item() * len(part) for part in rows.split(64))
        return {"bits_per_byte": nats / len(rows) / log(2)}


class Transformer(Text):
    """The byte GPT of the examples, 279 thousand parameters."""

    model, batch_size = pytorch_bytelm.ByteGPT, 2


class Convolutions(Text):
    """160 thousand parameters."""

    model, batch_size = CausalConvolutions, 3


class Gru(Text):
    """A GRU of 128 units, 107 thousand parameters."""

    model, batch_size, length = partial(Recurrent, 48, 128), 4, 33


class Embeddings(Text):
    """A perceptron over the embeddings of 8 bytes, 140 thousand parameters."""

    model, batch_size = partial(Perceptron, 32, 256), 4


class Wide(Text):
    """A perceptron of two wide layers, 5.7 million parameters."""

    model, batch_size, length = partial(Perceptron, 128, 2048, 1536), 1, 33


class Patches(Loop):
    """A residual network with batch norm, 80 thousand parameters, on patches of photographs."""

    model, batch_size = partial(Residual, 2 * CELLS[0] * CELLS[1]), 16

    def columns(self, split: str) -> tuple[Tensor, ...]:
        """Patches and the parts they are from; sorted by part for skewed shards."""
        patches, parts = _patches(split)
        order = parts.argsort(stable=True) if self.skewed else torch.arange(len(parts))
        return patches[order], parts[order]

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Cross entropy."""
        patches, parts = batch
        return cross_entropy(model(patches), parts)

    def score(self, model: nn.Module) -> dict[str, float]:
        """Share of patches that are recognised."""
        patches, parts = self.columns(self.split)
        model.eval()
        found = torch.cat([model(each).argmax(dim=1) for each in patches.split(512)])
        model.train()
        return {"accuracy": (found == parts).double().mean().item()}


LOOPS = {
    "residual": Patches,
    "convolutions": Convolutions,
    "transformer": Transformer,
    "recurrent": Gru,
    "embeddings": Embeddings,
    "wide": Wide,
}


def workload(*, model: str, **options: Any) -> Loop:
    """A model with its options, for `horovod-topk compare --simulated`."""
    return LOOPS[model](**options)


@cache
def _patches(split: str) -> tuple[Tensor, Tensor]:
    """Patches [N, 3, 16, 16] and their parts [N]; of an eighth of the tiles each are held out."""
    from sklearn.datasets import load_sample_images

    found: list[Tensor] = []
    parts: list[Tensor] = []
    for number, pixels in enumerate(load_sample_images().images):
        picture = torch.tensor(pixels).permute(2, 0, 1).float().div(255).sub(0.45).div(0.25)
        high, wide = (size // TILE for size in picture.shape[1:])
        for i in range(high):
            for j in range(wide):
                if _split_of(number, i, j) != split:
                    continue
                tile = picture[:, i * TILE : (i + 1) * TILE, j * TILE : (j + 1) * TILE]
                stride = PATCH // (4 if split == "training" else 2)
                cut = tile.unfold(1, PATCH, stride).unfold(2, PATCH, stride)
                found.append(cut.permute(1, 2, 0, 3, 4).reshape(-1, 3, PATCH, PATCH))
                part = (number * CELLS[0] + i * CELLS[0] // high) * CELLS[1] + j * CELLS[1] // wide
                parts.append(torch.full((len(found[-1]),), part))
    return torch.cat(found), torch.cat(parts)


def _split_of(picture: int, i: int, j: int) -> str:
    drawn = zlib.crc32(f"{picture},{i},{j}".encode()) % 8
    return {0: "held-out", 1: "validation"}.get(drawn, "training")
