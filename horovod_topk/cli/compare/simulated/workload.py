"""The workload of a script for simulated ranks: a model, its data, its loss and its score."""

from __future__ import annotations

import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

SPARE = "workload"  # the name of the function


class Workload(Protocol):
    """A training run without its loop. `workload(**options)` of the script returns one.

    If it has a number as the attribute `clip_norm`, exchanged gradients are clipped to it.
    """

    steps: int  # steps of a run
    every: int  # steps between two scores

    def model(self) -> nn.Module:
        """Return a new model, initialised by PyTorch's global generator, which is seeded."""

    def optimizer(self, model: nn.Module) -> Optimizer | list[Optimizer]:
        """Return the optimizer of the model's parameters, or several that share them."""

    def schedule(self, optimizer: Optimizer) -> Any:
        """Return an object whose `step()` is called after every step, or None."""

    def batches(self, rank: int, ranks: int, seed: int) -> Iterator[Any]:
        """Yield a rank's batches for ever; their order depends only on the arguments."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss of a batch."""

    def score(self, model: nn.Module) -> Mapping[str, float]:
        """Return metrics on unseen data, by name. Gradients are off."""


@torch.no_grad()
def scored(workload: Workload, model: nn.Module) -> dict[str, float | None]:
    """A model's metrics by name; all None if a metric or a weight is not finite."""
    found = workload.score(model)
    finite = all(bool(p.isfinite().all()) for p in model.parameters())
    finite = finite and all(map(math.isfinite, found.values()))
    return {name: round(value, 6) if finite else None for name, value in found.items()}


def load(script: Path) -> Callable[..., Workload]:
    """Return the function `workload` of a script."""
    known = sys.modules.get(_name(script))
    if known is None:
        spec = importlib.util.spec_from_file_location(_name(script), script)
        assert spec is not None and spec.loader is not None
        known = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(script.parent))  # as the interpreter does for a script
        spec.loader.exec_module(known)
        sys.modules[_name(script)] = known
    found = getattr(known, SPARE, None)
    if not inspect.isfunction(found):
        raise ValueError(f"{script} has no function {SPARE}(**options), which --simulated needs")
    return found


def _name(script: Path) -> str:
    return f"horovod_topk_compared_{script.stem}"
