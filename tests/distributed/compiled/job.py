"""One rank that compiles steps of its optimizer, and whole ones: python job.py ADAPTER FOLDER.

Rank 0 writes what torch.compile has made of each, without compression and with it.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

ADAPTER, FOLDER = sys.argv[1], Path(sys.argv[2])
STEPS = 10

if ADAPTER == "ddp":
    import torch.distributed as hvd
    from torch.nn.parallel import DistributedDataParallel

    from horovod_topk.ddp import TopKEF
else:
    import horovod.torch as hvd

    from horovod_topk.torch import TopKEF


def distributed(compresses: bool) -> tuple[Any, Any, Any]:
    """A model, its optimizer, and what `TopKEF.of` takes."""
    torch.manual_seed(0)
    model: Any = nn.Linear(50, 60)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2))
    if ADAPTER == "ddp":
        model = DistributedDataParallel(model)
        if compresses:
            TopKEF(warmup=None).attach(model, optimizer)
        return model, optimizer, model
    ours = {"compression": TopKEF(warmup=None)} if compresses else {}
    named = {"named_parameters": model.named_parameters()}
    optimizer = hvd.DistributedOptimizer(optimizer, **named, **ours)
    return model, optimizer, optimizer


def step_alone(model: Any, optimizer: Any) -> Callable[[torch.Tensor], None]:
    step = torch.compile(lambda: optimizer.step(), backend="eager")

    def train(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        step()

    return train


def whole(model: Any, optimizer: Any) -> Callable[[torch.Tensor], None]:
    def train(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return torch.compile(train, backend="eager")


def main() -> None:
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    hvd.init_process_group("gloo") if ADAPTER == "ddp" else hvd.init()
    rank = hvd.get_rank() if ADAPTER == "ddp" else hvd.rank()
    found = {}
    for way in (step_alone, whole):
        for compresses in (False, True):
            torch._dynamo.reset()
            counters.clear()
            model, optimizer, key = distributed(compresses)
            train = way(model, optimizer)
            for _ in range(STEPS):
                train(torch.randn(4, 50))
            graphs = counters["stats"]["unique_graphs"]
            steps = TopKEF.of(key).stats().steps if compresses else STEPS
            breaks = sum(counters["graph_break"].values())
            found[f"{way.__name__} {compresses}"] = [graphs, breaks, steps]
    if rank == 0:
        (FOLDER / "found.json").write_text(json.dumps(found))


main()
