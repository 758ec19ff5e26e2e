"""One rank that compiles parts of its training steps, and whole ones: python job.py ADAPTER FOLDER.

Rank 0 writes what torch.compile has made of each, without compression and with it, and what all
ranks' weights are in the end.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

from horovod_topk.errors import UnsupportedOperationError

ADAPTER, FOLDER = sys.argv[1], Path(sys.argv[2])
STEPS = 10

if ADAPTER == "horovod":
    import horovod.torch as hvd

    from horovod_topk.torch import TopKEF
else:
    import torch.distributed as hvd
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from horovod_topk import ddp, fsdp

    TopKEF = (fsdp if ADAPTER == "fsdp" else ddp).TopKEF


class Unit(nn.Module):
    """torch.compile leaves the modules of torch.nn alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(50, 50)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh() + x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList([Unit(), Unit()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for unit in self.units:
            x = unit(x)
        return x


def distributed(compresses: bool, **settings: Any) -> tuple[Any, Any, Any]:
    """A model, its optimizer, and what `TopKEF.of` takes."""
    torch.manual_seed(0)
    model: Any = Net()
    if ADAPTER == "fsdp":
        names = ("replicate", "shard")
        mesh = hvd.init_device_mesh("cpu", (2, hvd.get_world_size() // 2), mesh_dim_names=names)
        for unit in (*model.units, model):
            fully_shard(unit, mesh=mesh["shard"] if compresses else mesh)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2))
    if ADAPTER == "horovod":
        ours = {"compression": TopKEF(warmup=None, **settings)} if compresses else {}
        named = {"named_parameters": model.named_parameters()}
        optimizer = hvd.DistributedOptimizer(optimizer, **named, **ours)
        return model, optimizer, optimizer
    if ADAPTER == "ddp":
        model = DistributedDataParallel(model)
    if compresses:
        between = {"between": mesh["replicate"]} if ADAPTER == "fsdp" else {}
        TopKEF(warmup=None, **settings).attach(model, optimizer, **between)
    return model, optimizer, model


def eager(model: Any, optimizer: Any) -> Callable[[torch.Tensor], None]:
    def train(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return train


def step_alone(model: Any, optimizer: Any) -> Callable[[torch.Tensor], None]:
    step = torch.compile(lambda: optimizer.step(), backend="eager")

    def train(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        step()

    return train


def whole(model: Any, optimizer: Any) -> Callable[[torch.Tensor], None]:
    return torch.compile(eager(model, optimizer), backend="eager")


def model_alone(model: Any, optimizer: Any) -> Callable[[torch.Tensor], None]:
    return eager(torch.compile(model, backend="aot_eager"), optimizer)


def inductor(model: Any, optimizer: Any) -> Callable[[torch.Tensor], None]:
    return eager(torch.compile(model), optimizer)


def units(model: Any, optimizer: Any) -> Callable[[torch.Tensor], None]:
    for unit in model.modules():
        if isinstance(unit, Unit):
            unit.compile(backend="aot_eager")
    return eager(model, optimizer)


def refused_autograd() -> str:
    """What a compiled backward() of FSDP2 is told."""
    model, optimizer, _ = distributed(compresses=True)
    with torch._dynamo.config.patch(compiled_autograd=True):
        train = whole(model, optimizer)
        try:
            train(torch.randn(4, 50))
        except UnsupportedOperationError as error:
            return str(error)
    return ""


def weights(model: nn.Module) -> str:
    """A digest of all ranks' weights, or of their shards of them."""
    digest = hashlib.sha256()
    for p in model.parameters():
        digest.update(getattr(p, "_local_tensor", p).detach().numpy().tobytes())
    if ADAPTER == "horovod":
        return " ".join(hvd.allgather_object(digest.hexdigest()))
    found: list[Any] = [None] * hvd.get_world_size()
    hvd.all_gather_object(found, digest.hexdigest())
    return " ".join(found)


def trained(way: Any, compresses: bool, **settings: Any) -> list[Any]:
    """Numbers of graphs, of graph breaks and of steps that have exchanged, and the weights."""
    torch._dynamo.reset()
    counters.clear()
    model, optimizer, key = distributed(compresses, **settings)
    train = way(model, optimizer)
    torch.manual_seed(1 + RANK)
    for _ in range(STEPS):
        train(torch.randn(4, 50))
    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    steps = TopKEF.of(key).stats().steps if compresses else STEPS
    return [graphs, breaks, steps, weights(model)]


def main() -> None:
    found: dict[str, Any] = {}
    for way in (eager, step_alone, whole, model_alone, units):
        for compresses in (False, True):
            if (ADAPTER, way, compresses) == ("horovod", whole, False):
                continue  # traced, Horovod's own hooks begin an allreduce of a tensor twice
            found[f"{way.__name__} {compresses}"] = trained(way, compresses)
    if ADAPTER == "fsdp":
        found["inductor False"] = trained(inductor, False)
        found["inductor True"] = trained(inductor, True, ratio=1.0, values="float32")
        found["compiled autograd"] = refused_autograd()
    if RANK == 0:
        (FOLDER / "found.json").write_text(json.dumps(found))


logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
hvd.init() if ADAPTER == "horovod" else hvd.init_process_group("gloo")
RANK = hvd.rank() if ADAPTER == "horovod" else hvd.get_rank()
main()
