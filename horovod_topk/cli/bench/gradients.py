"""A module with a model's parameters whose backward returns given gradients, last layer first."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor, nn

from horovod_topk.cli.bench.compute import Compute
from horovod_topk.core.plan.buckets import BUCKET_ELEMENTS, TensorSpec

UNIT = 4 * BUCKET_ELEMENTS  # bytes of weights that FSDP2 shards together
POOL = 2  # number of sets of gradients to draw from
IDLE_SHAPE = (1024,)


@dataclass(frozen=True)
class Weights:
    """Weights and gradients that all runners share, to save memory."""

    shapes: list[tuple[int, ...]]  # in the order of forward
    weights: list[Tensor]  # zeros; the learning rate is tiny
    pool: list[list[Tensor]]  # gradients of this rank

    @classmethod
    def of(cls, specs: Sequence[TensorSpec], rank: int) -> Weights:
        """Make weights and gradients for tensors given in the order of backward."""
        shapes = [spec.shape for spec in reversed(specs)]
        generator = torch.Generator().manual_seed(rank)
        pool = [[_heavy_tailed(shape, generator) for shape in shapes] for _ in range(POOL)]
        return cls(shapes, [torch.zeros(shape) for shape in shapes], pool)


def _heavy_tailed(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Normal values, each with its own log-normal standard deviation."""
    scale = torch.randn(shape, generator=generator).exp_()
    return scale.mul_(torch.randn(shape, generator=generator))


class GivenGradients(nn.Module):
    """A module whose parameters share memory with those of other runners.

    Args:
        idle: number of additional parameters without a gradient, spread evenly among the others.
    """

    def __init__(self, shared: Weights, seed: int, compute: Compute | None, idle: int) -> None:
        super().__init__()
        count = len(shared.shapes)
        before = [index * count // idle for index in range(idle)]  # positions of idle parameters
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
        """Draw the next step's gradients: of either sign, and of a norm that varies by 30%."""
        self._gradients = self._draw.choice(self._pool)
        self._factor = self._draw.choice((-1, 1)) * self._draw.uniform(0.7, 1.3)

    def gradient(self, index: int) -> Tensor:
        """The gradient of one tensor, after its layer's share of the simulated computation."""
        given = self._gradients[index]
        if self.compute is not None and given.dim() > 1:
            self.compute.work(self._share)
        return given * self._factor

    def forward(self, token: Tensor) -> Tensor:
        """Chain all layers, so that backward runs from the last to the first."""
        for index, place in enumerate(self._used):
            token = _Layer.apply(token, self.weights[place], self, index)  # type: ignore[no-untyped-call]
        return token

    def units(self) -> nn.Sequential:
        """The layers as modules of 25 MiB, which FSDP2 shards; there are no idle parameters."""
        ends = [*accumulate(weight.nbytes for weight in self.weights)]
        units = groupby(range(len(ends)), lambda layer: ends[layer] // UNIT)
        return nn.Sequential(*(_Unit(self, [*layers]) for _, layers in units))


class _Unit(nn.Module):
    """Consecutive layers of a module, whose weights FSDP2 may replace."""

    def __init__(self, module: GivenGradients, layers: Sequence[int]) -> None:
        super().__init__()
        self._of = module, layers  # in a tuple: it is no submodule
        self.weights = nn.ParameterList(module.weights[layer] for layer in layers)

    def forward(self, token: Tensor) -> Tensor:
        module, layers = self._of
        for weight, layer in zip(self.weights, layers, strict=True):
            token = _Layer.apply(token, weight, module, layer)  # type: ignore[no-untyped-call]
        return token


class _Layer(torch.autograd.Function):
    """Passes its input on; backward returns the given gradient for its weight."""

    @staticmethod
    def forward(
        ctx: Any, token: Tensor, weight: Tensor, module: GivenGradients, index: int
    ) -> Tensor:
        ctx.module, ctx.index = module, index
        return token.clone()

    @staticmethod
    def backward(ctx: Any, *arriving: Any) -> Any:
        return arriving[0], ctx.module.gradient(ctx.index), None, None
