"""A small model, its data, and what the ranks of a test report."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

ROWS, SIZE = 96, 64


class Net(nn.Module):
    """A perceptron of 12,545 parameters, which returns its loss as Transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(SIZE, 128), nn.ReLU(), nn.Linear(128, 32))
        self.last = nn.Linear(32, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.last(self.layers(x)).squeeze(-1) - labels).square().mean()}


def rows() -> list[dict[str, Tensor]]:
    """The data of all ranks, row by row."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, SIZE, generator=generator)
    return [{"x": each, "labels": each[:8].sum()} for each in x]


def report(file: Path, model: nn.Module, state: Any) -> None:
    """Write what a rank has: weights as numbers that JSON keeps to the bit, and statistics."""
    stats, rank = state.stats(), dist.get_rank() if dist.is_initialized() else 0
    weights = {name: p.detach().double().tolist() for name, p in model.named_parameters()}
    found = {
        "weights": weights,
        "active": stats.active,
        "steps": stats.steps,
        "sent_bytes": stats.sent_bytes,
        "dense_bytes": stats.dense_bytes,
        "residual_norm": stats.residual_norm,
        "skipped": dict(stats.skipped),
    }
    file.with_suffix(f".{rank}").write_text(json.dumps(found))


def end() -> None:
    """Leave the job in order: a rank that ends right after a collective of Gloo may abort."""
    if dist.is_initialized():
        dist.barrier()
        time.sleep(0.5)
        dist.destroy_process_group()
