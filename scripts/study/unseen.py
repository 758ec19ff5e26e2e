"""Four more models and training loops, on which nothing of the default was chosen.

`horovod-topk compare --simulated` calls `workload(**options)`. Each loop differs from those of
`study.loops` in what its model is made of, and in its schedule and settings of the optimizer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, scaled_dot_product_attention, silu
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, MultiStepLR, OneCycleLR

sys.path.append(str(Path(__file__).parents[1]))

from study.loops import Loop, Patches, Text
from study.networks import BYTES

NOISE = 0.5  # standard deviation, of pixels with a standard deviation of about 1


class Hashed(nn.Module):
    """Predicts the next byte from embeddings of hashed n-grams: [N, T] -> [N, T, 256].

    Most rows of the tables have no gradient in a step.
    """

    def __init__(self, rows: int = 2048, width: int = 32, longest: int = 4) -> None:
        super().__init__()
        self.rows = rows
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(longest))
        self.layers = nn.Sequential(
            nn.Linear(longest * width, 192), nn.Tanh(), nn.Linear(192, BYTES)
        )

    def forward(self, text: Tensor) -> Tensor:
        """Logits of the byte that follows each."""
        found, past, key = [], text, torch.zeros_like(text)
        for table in self.tables:
            key = (key * 1_000_003 + past + 1) % 2_147_483_647
            found.append(table(key % self.rows))
            past = nn.functional.pad(past, (1, 0))[:, :-1]
        return self.layers(torch.cat(found, dim=-1))


class Lstm(nn.Module):
    """Predicts the next byte with two LSTM layers and dropout: [N, T] -> [N, T, 256]."""

    def __init__(self, width: int = 48, hidden: int = 112) -> None:
        super().__init__()
        self.byte = nn.Embedding(BYTES, width)
        self.layers = nn.LSTM(width, hidden, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(hidden, BYTES)

    def forward(self, text: Tensor) -> Tensor:
        """Logits of the byte that follows each."""
        return self.head(self.layers(self.byte(text))[0])


class GatedLayer(nn.Module):
    """Adds causal attention, then a gated layer (Shazeer 2020), to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.joined = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[N, T, width] -> [N, T, width]."""
        x = x + self.attended(x)
        y = self.norms[1](x)
        return x + self.down(silu(self.gate(y)) * self.up(y))

    def attended(self, x: Tensor) -> Tensor:
        """Return what attention adds: [N, T, width] -> [N, T, width]."""
        parts = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).movedim(2, 0)
        q, k, v = (part.transpose(1, 2) for part in parts)
        seen = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.joined(seen.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """A transformer that has RMS norms and gated layers, and no biases: [N, T] -> [N, T, 256]."""

    layer: type[GatedLayer] = GatedLayer  # a subclass may have another

    def __init__(self, width: int = 72, layers: int = 3, heads: int = 4, longest: int = 64) -> None:
        super().__init__()
        self.byte = nn.Embedding(BYTES, width)
        self.place = nn.Parameter(0.02 * torch.randn(longest, width))
        self.layers = nn.ModuleList(self.layer(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        nn.init.normal_(self.byte.weight, std=0.05)

    def forward(self, text: Tensor) -> Tensor:
        """Logits of the byte that follows each."""
        x = self.byte(text) + self.place[: text.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.byte.weight.T


class Unet(nn.Module):
    """Removes noise from patches, with batch norms: [N, 3, 16, 16] -> [N, 3, 16, 16]."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.before, self.low = _convolved(3, width), _convolved(width, 2 * width)
        self.after = _convolved(3 * width, width)
        self.noise = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, noisy: Tensor) -> Tensor:
        """Return the images, less the noise that the network predicts in them."""
        high = self.before(noisy)
        low = self.low(nn.functional.avg_pool2d(high, 2))
        both = torch.cat([high, nn.functional.interpolate(low, scale_factor=2)], dim=1)
        return noisy - self.noise(self.after(both))


def _convolved(before: int, after: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs in (before, after):
        conv = nn.Conv2d(inputs, after, 3, padding=1, bias=False)
        layers += [conv, nn.BatchNorm2d(after), nn.SiLU()]
    return nn.Sequential(*layers)


class HashedLoop(Text):
    """Trains `Hashed`, which has 340 thousand parameters, with a rate that falls from the start."""

    model, batch_size = Hashed, 4
    sgd: Mapping[str, Any] = {"momentum": 0.9}

    def schedule(self, optimizer: Optimizer) -> LRScheduler:
        """Return a schedule whose rate falls linearly to zero."""
        return LambdaLR(optimizer, lambda step: max(0.0, 1 - step / self.steps))


class LstmLoop(Text):
    """Trains `Lstm`, which has 210 thousand parameters, with a rate that falls in two steps."""

    model, batch_size, length = Lstm, 4, 33

    def schedule(self, optimizer: Optimizer) -> LRScheduler:
        """Return a schedule that divides the rate by 5 after 60% and after 85% of the steps."""
        falls = [round(share * self.steps) for share in (0.6, 0.85)]
        return MultiStepLR(optimizer, falls, gamma=0.2)

    def score(self, model: nn.Module) -> dict[str, float]:
        """Return bits a byte, computed without dropout."""
        model.eval()
        found = super().score(model)
        model.train()
        return found


class GatedLoop(Text):
    """Trains `Gated`, which has 180 thousand parameters, as language models often are."""

    model, batch_size = Gated, 2
    sgd: Mapping[str, Any] = {"momentum": 0.95, "weight_decay": 1e-5}
    adamw: Mapping[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.1}


class UnetLoop(Patches):
    """Trains `Unet`, which has 59 thousand parameters, to remove noise from patches."""

    batch_size = 4
    model = Unet

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._peak = options["lr"]

    def schedule(self, optimizer: Optimizer) -> LRScheduler:
        """Return OneCycleLR with PyTorch's defaults; it moves momentum between 0.85 and 0.95."""
        return OneCycleLR(optimizer, max_lr=self._peak, total_steps=self.steps + 1)

    def batches(self, rank: int, ranks: int, seed: int) -> Iterator[tuple[Tensor, ...]]:
        """Yield patches, and the noise to add to them."""
        generator = torch.Generator().manual_seed(10_000 + 1000 * seed + rank)
        for patches, _ in super().batches(rank, ranks, seed):
            yield patches, NOISE * torch.randn(patches.shape, generator=generator)

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Return the mean squared error."""
        patches, noise = batch
        return mse_loss(model(patches + noise), patches)

    def score(self, model: nn.Module) -> dict[str, float]:
        """Return the mean squared error; all scores use the same noise."""
        patches, _ = self.columns(self.split)
        noise = NOISE * torch.randn(patches.shape, generator=torch.Generator().manual_seed(7))
        model.eval()
        error = self.loss(model, (patches, noise)).item()
        model.train()
        return {"mse": error}


LOOPS: dict[str, type[Loop]] = {
    "hashed": HashedLoop,
    "lstm": LstmLoop,
    "gated": GatedLoop,
    "unet": UnetLoop,
}


def workload(*, model: str, **options: Any) -> Loop:
    """A model with its options, for `horovod-topk compare --simulated`."""
    return LOOPS[model](**options)
