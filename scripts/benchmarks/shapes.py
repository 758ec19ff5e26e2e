"""Training of a known model's shapes without the model, on ranks that time or count an exchange."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn

from horovod_topk.cli.models import specs_of


class Shapes(nn.Module):
    """Parameters of a known model, whose gradients cost nothing but their memory."""

    def __init__(self, model: str = "resnet50") -> None:
        super().__init__()
        shapes = [spec.shape for spec in reversed(specs_of(model))]
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)

    def loss(self, directions: Sequence[Tensor]) -> Tensor:
        """Linear: its gradients are the directions."""
        pairs = zip(self.weights, directions, strict=True)
        return torch.stack([(w * d).sum() for w, d in pairs]).sum()

    def noise(self, generator: torch.Generator) -> list[Tensor]:
        """Random directions."""
        return [torch.randn(weight.shape, generator=generator) for weight in self.weights]


def training(
    model: Shapes, compression: object | None, loss: Callable[[], Tensor]
) -> tuple[Callable[[], None], Any]:
    """A step of training with Horovod, and its optimizer."""
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-9)
    if compression is not None:
        names = model.named_parameters()
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=names, compression=compression
        )

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step, optimizer


def varying(model: Shapes, compression: object | None) -> tuple[Callable[[], None], Any]:
    """The same with one of three gradients a step, of random sign and a norm that varies."""
    generator = torch.Generator().manual_seed(hvd.rank())
    pool = [model.noise(generator) for _ in range(3)]
    draw = random.Random(hvd.rank())

    def loss() -> Tensor:
        factor = draw.choice((-1, 1)) * draw.uniform(0.7, 1.3)
        return factor * model.loss(draw.choice(pool))

    return training(model, compression, loss)
