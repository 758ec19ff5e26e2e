"""Models of the default's study with the optimizers that people train with, on simulated ranks.

`horovod-topk compare --simulated` calls `workload(**options)`. Optimizers that PyTorch does not
have are those of the packages pytorch_optimizer and bitsandbytes.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn, optim
from torch.optim import Optimizer

sys.path.append(str(Path(__file__).parents[1]))

from study import loops, unseen
from study.loops import Loop

LOOPS = loops.LOOPS | unseen.LOOPS
EMBEDDINGS_AND_HEADS = "embed", "embedding", "head", "out"  # beginnings of parts of names


def muon_and_adamw(model: nn.Module, lr: float) -> list[Optimizer]:
    """Muon for hidden matrices, and AdamW at a fifth of the rate for all other parameters."""
    named = list(model.named_parameters())
    hidden = [p for name, p in named if p.ndim == 2 and not name.startswith(EMBEDDINGS_AND_HEADS)]
    others = [p for _, p in named if not any(p is each for each in hidden)]
    return [optim.Muon(hidden, lr=lr), optim.AdamW(others, lr=lr / 5, betas=(0.9, 0.95))]


def of_package(
    name: str, module: str = "pytorch_optimizer", **settings: Any
) -> Callable[..., Optimizer]:
    """An optimizer of a package that only this study needs."""

    def make(parameters: Any, lr: float) -> Optimizer:
        kind = getattr(importlib.import_module(module), name)
        made: Optimizer = kind(parameters, lr=lr, **settings)
        return made

    return make


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "AdamW": optim.AdamW,
    "NAdam": optim.NAdam,
    "RAdam": optim.RAdam,
    "Adamax": optim.Adamax,
    "RMSprop": optim.RMSprop,
    "RMSprop, momentum": partial(optim.RMSprop, momentum=0.9),
    "Adagrad": optim.Adagrad,
    "Adadelta": optim.Adadelta,
    "Adafactor": optim.Adafactor,
    "Adam without momentum": partial(optim.Adam, betas=(0.0, 0.99)),
    "LAMB": of_package("Lamb"),
    "Lion": of_package("Lion", weight_decay=0.1),
    "SOAP": of_package("SOAP"),
    "ADOPT": of_package("ADOPT"),
    "Prodigy": of_package("Prodigy"),
    "Schedule-Free AdamW": of_package("ScheduleFreeAdamW"),
    "8-bit AdamW": of_package("AdamW8bit", "bitsandbytes.optim"),
}


def workload(*, model: str, optimizer: str, batch_size: int = 0, **options: Any) -> Loop:
    """A model with its options, for `horovod-topk compare --simulated`.

    Args:
        model: a key of `LOOPS`.
        optimizer: a key of `OPTIMIZERS`, "Muon and AdamW", or one that the model's own loop knows.
        batch_size: rows of a rank's batch; 0: the loop's own.
        options: as of the loop.
    """

    class AnyOptimizer(LOOPS[model]):
        def optimizer(self, model: nn.Module) -> Any:
            if optimizer == "Muon and AdamW":
                return muon_and_adamw(model, self._lr)
            return OPTIMIZERS[optimizer](model.parameters(), lr=self._lr)

    is_own = optimizer in ("momentum", "nesterov", "adam", "adamw")
    loop: Loop = (LOOPS[model] if is_own else AnyOptimizer)(
        optimizer=optimizer if is_own else "adamw", **options
    )
    loop.batch_size = batch_size or loop.batch_size
    return loop
