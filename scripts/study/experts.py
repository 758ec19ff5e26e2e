"""A mixture of experts whose ranks read unlike data, on simulated ranks.

`horovod-topk compare --simulated` calls `workload(**options)`. Each byte goes to the one expert
that its router scores highest (Fedus 2021). The loss may have a term that asks for equal use of
experts.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

sys.path.append(str(Path(__file__).parents[1]))

from study.loops import Loop, Text
from study.unseen import Gated, GatedLayer

EXPERTS = 8  # of a layer


class Experts(nn.Module):
    """One of several feed-forward layers for each vector: [N, T, width] -> same.

    Attributes:
        used: share of the last batch's vectors that each expert had, [experts].
        balance: the loss of unequal use in the last batch; 1 for equal use.
    """

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(experts)
        )
        self.used, self.balance = torch.zeros(experts), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        """Return what each vector's expert makes of it, times the router's probability."""
        flat = x.flatten(0, 1)
        probabilities = self.router(flat).softmax(dim=-1)
        share, chosen = probabilities.max(dim=-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):  # one without vectors has zero gradients
            (rows,) = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, rows, expert(flat[rows]) * share[rows, None])
        self.used = torch.bincount(chosen, minlength=len(self.experts)) / len(chosen)
        self.balance = len(self.experts) * (self.used * probabilities.mean(dim=0)).sum()
        return out.view_as(x)


class RoutedLayer(GatedLayer):
    """A layer of attention, then experts: [N, T, width] -> same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        del self.gate, self.up, self.down
        self.mixture = Experts(width, EXPERTS)

    def forward(self, x: Tensor) -> Tensor:
        """[N, T, width] -> [N, T, width]."""
        x = x + self.attended(x)
        return x + self.mixture(self.norms[1](x))


class Routed(Gated):
    """A transformer with experts, 401 thousand parameters: [N, T] -> [N, T, 256]."""

    layer = RoutedLayer

    def __init__(self) -> None:
        super().__init__(layers=2)

    @property
    def mixtures(self) -> list[Experts]:
        """The experts of each layer."""
        return [layer.mixture for layer in self.layers]


class RoutedLoop(Text):
    """Trains `Routed`."""

    model, batch_size = Routed, 4

    def __init__(self, *, balance: float = 0.01, **options: Any) -> None:
        super().__init__(**options)
        self.balance = balance

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Nats a byte, and in training the loss of unequal use."""
        (text,) = batch
        nats = cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        if not torch.is_grad_enabled():
            return nats
        return nats + self.balance * sum(each.balance for each in model.mixtures)


def workload(**options: Any) -> Loop:
    """A run with its options, for `horovod-topk compare --simulated`."""
    return RoutedLoop(**options)
