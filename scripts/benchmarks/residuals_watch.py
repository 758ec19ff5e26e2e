"""An exchange that notes the norms of gradients and residuals, and the bounds of theory for them.

A compressor C is a delta-contraction if ||a - C(a)||^2 <= (1 - delta) ||a||^2 for every a. Top-K
with k of n elements is one with delta = k / n: the k largest have at least that share of the
squares. With q = sqrt(1 - delta) and gradients of norm <= G then, for e' = a - C(a) and a = e + g,

    ||e'|| <= q (||e|| + ||g||)                  so that      ||e|| <= q / (1 - q) G

whatever the gradients are. Stich et al. 2018 (Lemma 3.3) and Karimireddy et al. 2019 (Lemma 3) have
it as ||e|| <= 2 / delta G and 2 sqrt(1 - delta) / delta G, of expected squares and in units of the
learning rate, which our residuals, of gradients, are not multiplied by.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from horovod_topk.cli.compare.simulated.exchanges import Compressed, Gradients
from horovod_topk.core.run.runner import StepRunner


def karimireddy(delta: float) -> float:
    """Times G."""
    return 2 * math.sqrt(1 - delta) / delta


def worst_case(delta: float) -> float:
    """Times G, whatever the gradients are."""
    q = math.sqrt(1 - delta)
    return q / (1 - q)


def along(delta: float, gradients: Iterable[float]) -> Iterator[float]:
    """The same step by step, with the norms that gradients had."""
    q, bound = math.sqrt(1 - delta), 0.0
    for norm in gradients:
        bound = q * (bound + norm)
        yield bound


def contraction(before: float, after: float) -> float:
    """The delta of one step: of a and a - C(a), by their norms; 1 if there was nothing to send."""
    return 1 - (after / before) ** 2 if before else 1.0


@dataclass
class Norms:
    """Of one rank, one a step."""

    gradient: list[float] = field(default_factory=list)
    residual: list[float] = field(default_factory=list)  # after the step, of its own gradients
    owned: list[float] = field(default_factory=list)  # of the shards it owns; 0 where it owns none
    contraction: list[float] = field(default_factory=list)  # measured delta


class Watched:
    """`horovod_topk.cli.compare.simulated.exchanges.Exchange`.

    Args:
        inner, names: what exchanges, and the names of the gradients, in their order.
        idle_every: the last rank's gradient is zero in every so many-th step; 0: never.
    """

    def __init__(self, inner: Compressed, names: Iterable[str], idle_every: int = 0) -> None:
        self._inner, self._names, self._idle_every = inner, list(names), idle_every
        self._steps = 0
        self.norms = [Norms() for _ in inner.compressors]

    def mean(self, gradients: list[Gradients]) -> Gradients:
        """`Exchange.mean`."""
        self._steps += 1
        if self._idle_every and self._steps % self._idle_every == 0:
            torch._foreach_zero_(gradients[-1])
        before = [self._note(rank, each) for rank, each in enumerate(gradients)]
        exchanged = self._inner.mean(gradients)
        for norms, compressor, compensated in zip(
            self.norms, self._inner.compressors, before, strict=True
        ):
            residual = norm_of(_residuals(compressor, self._names))
            norms.residual.append(residual)
            norms.owned.append(_owned(compressor))
            norms.contraction.append(contraction(compensated, residual))
        return exchanged

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _note(self, rank: int, gradients: Gradients) -> float:
        """The norm of e + g."""
        self.norms[rank].gradient.append(norm_of(gradients))
        residuals = _residuals(self._inner.compressors[rank], self._names)
        return norm_of(e + g.reshape(-1) for e, g in zip(residuals, gradients, strict=True))


def norm_of(tensors: Iterable[Tensor]) -> float:
    """Euclidean, of all together."""
    return math.hypot(*(float(torch.linalg.vector_norm(t, dtype=torch.float64)) for t in tensors))


def _residuals(compressor: StepRunner[Tensor], names: Iterable[str]) -> list[Tensor]:
    return [compressor.registry.residual(name) for name in names]


def _owned(compressor: StepRunner[Tensor]) -> float:
    if compressor.owned is None:
        return 0.0
    return norm_of(arenas.residual for arenas in compressor.owned.all_arenas())
