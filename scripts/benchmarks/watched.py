"""An exchange on simulated ranks that notes the norms of gradients and residuals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from horovod_topk.cli.compare.simulated.exchanges import Compressed, Gradients
from horovod_topk.cli.compare.simulated.training import Job


class Watched:
    """Takes the place of a job's exchange, which it calls.

    Args:
        job: what is trained, with a compressor.
        groups: names of the tensors whose norms are noted together.
        idle_every: the last rank's gradient is zero in every so many-th step; 0: never.

    Attributes:
        gradient, residual: of each step, [ranks, groups]; residuals are those after the step.
    """

    def __init__(self, job: Job, groups: Sequence[Sequence[str]], idle_every: int = 0) -> None:
        assert isinstance(job.exchange, Compressed)
        self._inner, self._groups, self._idle_every = job.exchange, groups, idle_every
        self._names = [name for name, _ in job.model.named_parameters()]
        self.gradient, self.residual = list[Tensor](), list[Tensor]()
        job.exchange = self

    def mean(self, gradients: list[Gradients]) -> Gradients:
        """`Exchange.mean`."""
        if self._idle_every and (len(self.gradient) + 1) % self._idle_every == 0:
            torch._foreach_zero_(gradients[-1])
        self.gradient.append(self._norms(gradients))
        exchanged = self._inner.mean(gradients)
        residuals = [map(rank.residual, self._names) for rank in self._inner.compressors]
        self.residual.append(self._norms(residuals))
        return exchanged

    def _norms(self, of_ranks: Sequence[Any]) -> Tensor:
        named = [dict(zip(self._names, each, strict=True)) for each in of_ranks]
        rows = [[_norm([rank[name] for name in names]) for names in self._groups] for rank in named]
        return torch.tensor(rows, dtype=torch.float64)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _norm(tensors: Sequence[Tensor]) -> float:
    """Return the Euclidean norm of all arrays together."""
    return math.hypot(*(float(torch.linalg.vector_norm(t, dtype=torch.float64)) for t in tensors))
