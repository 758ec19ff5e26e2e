"""A module with a model's parameters; its backward hands out given gradients, last layer first."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from horovod_topk.cli.bench.compute import Compute
from horovod_topk.core.plan import TensorSpec

POOL = 2  # sets of gradients that steps choose from
IDLE_SHAPE = (1024,)


@dataclass(frozen=True)
class Weights:
    """What all contestants share, since memory would not hold it once for each."""

    shapes: list[tuple[int, ...]]  # in the order in which forward uses them
    weights: list[Tensor]  # zero; steps of a tiny learning rate hardly move them
    pool: list[list[Tensor]]  # gradients of this rank

    @classmethod
    def of(cls, specs: Sequence[TensorSpec], rank: int) -> Weights:
        """Of tensors in the order in which backward reaches them."""
        shapes = [spec.shape for spec in reversed(specs)]
        generator = torch.Generator().manual_seed(rank)
        pool = [[_heavy_tailed(shape, generator) for shape in shapes] for _ in range(POOL)]
        return cls(shapes, [torch.zeros(shape) for shape in shapes], pool)


def _heavy_tailed(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Normal, each with a standard deviation of its own that is log-normal."""
    scale = torch.randn(shape, generator=generator).exp_()
    return scale.mul_(torch.randn(shape, generator=generator))


class GivenGradients(nn.Module):
    """Parameters that share memory with those of other contestants.

    Args:
        shared: weights and gradients.
        seed: of the choice of gradients; the same for all contestants of a rank.
        compute: what backward costs beside.
        idle: so many more parameters never have a gradient; they lie evenly among the others.
    """

    def __init__(self, shared: Weights, seed: int, compute: Compute | None, idle: int) -> None:
        super().__init__()
        count = len(shared.shapes)
        before = [index * count // idle for index in range(idle)]  # where the idle ones come
        self.weights = nn.ParameterList()
        self._used: list[int] = []
        for index, weight in enumerate(shared.weights):
            for _ in range(before.count(index)):
                self.weights.append(nn.Parameter(torch.zeros(IDLE_SHAPE)))
            self._used.append(len(self.weights))
            self.weights.append(nn.Parameter(weight))
        matrices = sum(len(shape) > 1 for shape in shared.shapes)
        self.idle = idle
        self.compute, self._share = compute, 1 / max(1, matrices)
        self._pool, self._draw = shared.pool, random.Random(seed)
        self._gradients, self._factor = shared.pool[0], 1.0

    def draw(self) -> None:
        """The next step's gradients: of either sign, and of a norm that varies by a third."""
        self._gradients = self._draw.choice(self._pool)
        self._factor = self._draw.choice((-1, 1)) * self._draw.uniform(0.7, 1.3)

    def gradient(self, index: int) -> Tensor:
        """Of one tensor, once its layer's share of backward is over."""
        given = self._gradients[index]
        if self.compute is not None and given.dim() > 1:
            self.compute.work(self._share)
        return given * self._factor

    def forward(self, token: Tensor) -> Tensor:
        """A chain of all layers, so that backward goes through it from the last to the first."""
        for index, place in enumerate(self._used):
            token = _Layer.apply(token, self.weights[place], self, index)  # type: ignore[no-untyped-call]
        return token


class _Layer(torch.autograd.Function):
    """Passes on what it gets; its weight's gradient is given."""

    @staticmethod
    def forward(
        ctx: Any, token: Tensor, weight: Tensor, module: GivenGradients, index: int
    ) -> Tensor:
        ctx.module, ctx.index = module, index
        return token.clone()

    @staticmethod
    def backward(ctx: Any, *arriving: Any) -> Any:
        return arriving[0], ctx.module.gradient(ctx.index), None, None
