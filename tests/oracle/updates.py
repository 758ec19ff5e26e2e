"""The update of one parameter by the mathematics of `horovod_topk.updates.formulas`, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from horovod_topk.torch_training.gradients import local
from horovod_topk.updates.formulas import AFTER


class Exact:
    """A parameter of SGD, Adam or AdamW."""

    def __init__(self, start: Tensor) -> None:
        self.p, self.steps = local(start).detach().double().numpy().copy(), 0
        self.codes = np.zeros(start.shape, int)
        self.m, self.v, self.largest = (np.zeros(start.shape) for _ in range(3))

    def step(self, group: Mapping[str, Any], gradient: Tensor, damping: Tensor, cut: float) -> None:
        """group: its parameter group; gradient: exchanged; factors: c of both classes."""
        lr, decay = float(group["lr"]), float(group["weight_decay"])
        c = np.where((self.codes / 255) ** 4 > 0.5, *damping.tolist())
        g = local(gradient).double().numpy().copy()
        self.codes = np.where(g != 0, *np.array(AFTER)[::-1][:, self.codes])
        phi, rms = (self.codes / 255) ** 4, np.sqrt(np.square(self.p).mean())
        g = -g if group["maximize"] else g
        self.steps += 1
        if "betas" not in group:
            g, mu = g + decay * self.p, group["momentum"]
            b = mu * phi**0.25
            total = mu * self.m + (1 - cut * phi) * g
            moved, self.m = (1 - b) * total / (1 - mu), b * total / mu
            self.p = self.p - lr * (g + mu * moved if group["nesterov"] else moved)
            return
        (beta1, beta2), t = map(float, group["betas"]), self.steps
        if group["decoupled_weight_decay"]:
            self.p = self.p * (1 - lr * decay)
        else:
            g = g + decay * self.p
        self.v = beta2 * self.v + (1 - beta2) * g**2
        root = np.sqrt(self.v / (1 - beta2**t))
        if t == 1:
            mean = g  # of Adam's own first step
        else:
            b = beta1 * phi**0.5
            mean = b * self.m / (1 - beta1 ** (t - 1)) + (1 - b) * c * g
            far = max(1.0, min(1.0, (1 - beta1) ** 2 * t) * rms / 5 / lr)
            mean = np.clip(mean, -far * root, far * root)
        self.m = mean * (1 - beta1**t)
        self.largest = np.maximum(self.largest, self.v)
        if group["amsgrad"]:
            root = np.sqrt(self.largest / (1 - beta2**t))
        self.p = self.p - lr * mean / (root + group["eps"])
