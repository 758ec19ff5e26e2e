"""Error feedback computed anew from its formulas: dense, by sorting, for all ranks in one process.

    a = e + g;   I = the k = ceil(ratio n) largest |a|;   e = a - a[I];   mean over ranks of a[I]

Shares no code with horovod_topk. Source: Stich et al. 2018, algorithm 1 (Mem-SGD).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from horovod_topk.torch_training.gradients import local
from training import MakeOptimizer, Task


class ErrorFeedback:
    """Trains `task` as `ranks` ranks would; `step` returns nothing, look at the fields.

    Tensors of fewer than `min_numel` elements are sent whole.
    """

    def __init__(
        self,
        task: Task,
        make_optimizer: MakeOptimizer,
        *,
        ranks: int,
        ratio: float,
        values: str = "float32",
        min_numel: int = 0,
        average: bool = True,
    ) -> None:
        self.task = task
        self.optimizer = make_optimizer(task.parameters())
        self.ranks, self.ratio, self.values = ranks, ratio, values
        self.min_numel, self.average = min_numel, average
        names = dict(task.named_parameters())
        self.residuals = [
            {name: np.zeros(p.numel(), np.float32) for name, p in names.items()}
            for _ in range(ranks)
        ]

    def step(self, batches: Sequence[int]) -> None:
        """One step on the gradients of some batches, accumulated."""
        applied = self.exchange(batches)
        for name, p in self.task.named_parameters():
            p.grad = torch.from_numpy(applied[name]).view(p.shape)
        self.optimizer.step()

    def exchange(self, batches: Sequence[int]) -> dict[str, np.ndarray]:
        """What every rank applies; residuals are updated."""
        total = {n: np.zeros(p.numel(), np.float32) for n, p in self.task.named_parameters()}
        for rank in range(self.ranks):
            for name, gradient in self._gradients(rank, batches).items():
                owed = self.residuals[rank][name] + gradient
                sent = self._sent(owed)
                self.residuals[rank][name] = owed - sent
                total[name] += sent
        scale = np.float32(1 / self.ranks if self.average else 1)
        return {name: value * scale for name, value in total.items()}

    def _gradients(self, rank: int, batches: Sequence[int]) -> dict[str, np.ndarray]:
        self.task.zero_grad()
        for batch in batches:
            self.task.loss(rank, batch).backward()
        return {n: _flat(p.grad) for n, p in self.task.named_parameters() if p.grad is not None}

    def _sent(self, owed: np.ndarray) -> np.ndarray:
        k = math.ceil(Fraction(str(self.ratio)) * owed.size)
        if owed.size < self.min_numel:
            k = owed.size
        keep = np.argsort(-np.abs(owed), kind="stable")[:k]
        sent = np.zeros_like(owed)
        sent[keep] = owed[keep].astype(self.values)
        return sent


def _flat(gradient: Tensor) -> np.ndarray:
    flat: np.ndarray = local(gradient).detach().clone().reshape(-1).numpy()
    return flat
