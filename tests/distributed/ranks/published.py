"""1-bit Adam and 1-bit LAMB as published, of all ranks at once, with the names of the papers.

Source: Tang et al. 2021 (1-bit Adam), algorithm 1; Li et al. 2021 (1-bit LAMB).
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from horovod_topk.ops.numpy import NumpyOps
from world import hvd

FREEZE = 3
SMALL = 16  # elements; smaller tensors travel whole
BLOCK = 512  # elements of a tensor that one owner has; every tensor here has at most two blocks
Array = NDArray[np.float32]


def gradients_of(task: Any, rank: int, step: int) -> dict[str, Array]:
    twin = deepcopy(task)
    twin.zero_grad()
    twin.loss(rank, step).backward()
    return {name: p.grad.numpy().ravel().copy() for name, p in twin.named_parameters()}


def signs(values: Array) -> Array:
    """C: the sign times the mean magnitude, of each block that has an owner of its own."""
    if values.size < SMALL:
        return values
    parts = []
    for block in np.split(values, range(BLOCK, values.size, BLOCK)):
        packed = NumpyOps().pack_values(block, "sign")[None]
        read = NumpyOps().unpack_values(packed, block.size, "sign", "float32")[0]
        assert np.abs(read[0]) == pytest.approx(np.abs(block).mean(), rel=2**-8, abs=1e-30)
        parts.append(read)
    return np.concatenate(parts)


class Published:
    """1-bit Adam.

    Args:
        task: the model, not yet wrapped by DistributedDataParallel.
        corrects: whether moments are corrected for their start at 0.
    """

    def __init__(self, task: Any, *, corrects: bool) -> None:
        self.task, self.corrects, self.t = deepcopy(task), corrects, 0
        zeros = {name: np.zeros(p.numel(), "f4") for name, p in task.named_parameters()}
        self.m, self.v, self.server = deepcopy(zeros), deepcopy(zeros), deepcopy(zeros)
        self.workers = [deepcopy(zeros) for _ in range(hvd.size())]
        self.scale = dict.fromkeys(zeros, 1.0)  # of exchanged momenta

    def step(self, lr: float, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> None:
        gradients = [gradients_of(self.task, rank, self.t) for rank in range(hvd.size())]
        self.t += 1
        if self.t == FREEZE + 1:
            self.freeze()
        for name, p in self.task.named_parameters():
            of_ranks, before = [one[name] for one in gradients], self.m[name]
            if self.t <= FREEZE:
                g = np.mean(of_ranks, 0, dtype="f4")
                self.m[name] = b1 * before + (1 - b1) * g
                self.v[name] = b2 * self.v[name] + (1 - b2) * g * g
            else:
                momenta = [self.scale[name] * (b1 * before + (1 - b1) * g) for g in of_ranks]
                self.m[name] = self.exchanged(name, momenta) / np.float32(self.scale[name])
            m, root = self.m[name], np.sqrt(self.v[name])
            if self.corrects:
                m, root = m / (1 - b1**self.t), root / np.sqrt(1 - b2 ** min(self.t, FREEZE))
            g = (self.m[name] - b1 * before) / (1 - b1)
            update = lr * self.direction(name, p.numpy(force=True).ravel(), m, root + eps, g)
            p.data -= torch.from_numpy(update.astype("f4")).view(p.shape)

    def freeze(self) -> None:
        """Before the first step with a frozen variance."""

    def direction(self, name: str, x: Array, m: Array, divisor: Array, g: Array) -> Array:
        """What is subtracted from x, without the learning rate; g is the mean gradient."""
        return m / divisor

    def exchanged(self, name: str, momenta: list[Array]) -> Array:
        sent = []
        for worker, momentum in zip(self.workers, momenta, strict=True):
            total = (momentum + worker[name]).astype("f4")
            sent.append(signs(total))
            worker[name] = total - sent[-1]
        mean = sum(sent, np.float32(0)) * np.float32(1 / hvd.size())  # sums of signs may be 0
        total = mean + self.server[name]
        back = signs(total)
        self.server[name] = total - back
        return back


class PublishedLamb(Published):
    """1-bit LAMB, without weight decay; moments are corrected."""

    def __init__(self, task: Any) -> None:
        super().__init__(task, corrects=True)
        self.c_avg, self.r = dict.fromkeys(self.m, 0.0), dict.fromkeys(self.m, 1.0)
        self.n, self.fresh = dict.fromkeys(self.m, 0), dict[str, Array]()

    def freeze(self) -> None:
        sizes = {name: np.sqrt(np.mean(np.square(m))) for name, m in self.m.items()}
        self.scale = {name: np.mean([*sizes.values()]) / size for name, size in sizes.items()}
        self.fresh = {name: v / (1 - 0.999**FREEZE) for name, v in self.v.items()}

    def direction(self, name: str, x: Array, m: Array, divisor: Array, g: Array) -> Array:
        u = m / divisor
        if self.t <= FREEZE and not x.any():
            return u
        if self.t <= FREEZE:
            c = min(max(np.linalg.norm(x) / np.linalg.norm(u), 0.01), 10.0)
            self.c_avg[name], self.n[name] = 0.9 * self.c_avg[name] + 0.1 * c, self.n[name] + 1
            return c * u
        self.fresh[name] = 0.999 * self.fresh[name] + 0.001 * g * g
        r = np.max(divisor / (np.sqrt(self.fresh[name]) + 1e-8))
        r = min(max(r, 0.9 * self.r[name]), 1.1 * self.r[name])
        self.r[name] = min(max(r, 0.5), 4.0)
        return self.r[name] * self.c_avg[name] / (1 - 0.9 ** self.n[name]) * u
