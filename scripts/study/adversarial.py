"""A generator and a discriminator that train against each other, on simulated ranks.

`horovod-topk compare --simulated` calls `workload(**options)`. Each network has an optimizer of its
own, and both take a step from the same weights.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import softplus
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

sys.path.append(str(Path(__file__).parents[1]))

from study.workloads import Study

BETAS = 0.5, 0.999
NOISE = 16  # numbers from which the generator makes a sample
SCORED = 1024  # samples
AVERAGED = 3  # evaluations: a game goes round and round


class Game(nn.Module):
    """A generator and a discriminator, both perceptrons, of samples [N, size]."""

    def __init__(self, size: int, width: int = 192) -> None:
        super().__init__()
        self.generator = _perceptron(NOISE, width, size)
        self.discriminator = _perceptron(size, width, 1)


def _perceptron(inputs: int, width: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before in (inputs, width, width):
        layers += [nn.Linear(before, width), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


class Ring(Study):
    """Eight Gaussians on a circle."""

    batch_size, size = 64, 2

    def __init__(self, **options: Any) -> None:
        super().__init__(optimizer="adam", **options)
        self.distances: list[float] = []

    def model(self) -> nn.Module:
        """The game, of 152 thousand parameters."""
        return Game(self.size)

    def optimizer(self, model: nn.Module) -> list[Optimizer]:
        """Adam for each network."""
        networks = (model.generator, model.discriminator)
        return [Adam(each.parameters(), self._lr, BETAS) for each in networks]

    def schedule(self, optimizer: Optimizer) -> LRScheduler:
        """A constant rate, as is common for games."""
        return LambdaLR(optimizer, lambda step: 1.0)

    def batches(self, rank: int, ranks: int, seed: int) -> Iterator[tuple[Tensor, ...]]:
        """Samples and noise."""
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        while True:
            yield self.samples(self.batch_size, generator), self.noise(self.batch_size, generator)

    def noise(self, count: int, generator: torch.Generator) -> Tensor:
        """[count, NOISE]."""
        return torch.randn(count, NOISE, generator=generator)

    def samples(self, count: int, generator: torch.Generator) -> Tensor:
        """[count, size]."""
        angle = torch.randint(8, (count,), generator=generator) * (torch.pi / 4)
        centre = torch.stack([angle.cos(), angle.sin()], dim=1)
        return centre + 0.05 * torch.randn(count, 2, generator=generator)

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """The sum of both losses, each of which has gradients for its own network alone."""
        samples, noise = batch
        made = model.generator(noise)
        frozen = {name: each.detach() for name, each in model.discriminator.named_parameters()}
        fooled = softplus(-functional_call(model.discriminator, frozen, made)).mean()
        told = softplus(-model.discriminator(samples)) + softplus(
            model.discriminator(made.detach())
        )
        return fooled + told.mean()

    def score(self, model: nn.Module) -> dict[str, float]:
        """Energy distance between what the generator makes and the data, of late a mean."""
        generator = torch.Generator().manual_seed(7)
        made = model.generator(self.noise(SCORED, generator))
        self.distances.append(energy_distance(made, self.samples(SCORED, generator)))
        return {"distance": fmean(self.distances[-AVERAGED:])}


class Images(Ring):
    """Digits of 8 x 8 pixels."""

    size = 64

    def samples(self, count: int, generator: torch.Generator) -> Tensor:
        """Random images."""
        images = _images()
        return images[torch.randint(len(images), (count,), generator=generator)]


@cache
def _images() -> Tensor:
    from sklearn.datasets import load_digits

    return torch.tensor(load_digits().data).float() / 8 - 1


def energy_distance(a: Tensor, b: Tensor) -> float:
    """Energy distance of two sets of samples [N, size] (Szekely and Rizzo 2013)."""
    between, within = torch.cdist(a, b).mean(), torch.cdist(a, a).mean() + torch.cdist(b, b).mean()
    return (2 * between - within).clamp(min=0).sqrt().item()


def workload(*, data: str, **options: Any) -> Ring:
    """Ring or images."""
    return {"ring": Ring, "images": Images}[data](**options)
