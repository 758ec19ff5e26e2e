"""A rank of the benchmark `fsdp`: times the steps of all variants in turns."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.does_it_pay_rank import join_ranks
from benchmarks.fsdp import NONE, RANKS, UNITS, WIDTH, Job
from horovod_topk.cli.bench.gradients import GivenGradients, Weights
from horovod_topk.cli.models import specs_of
from horovod_topk.cli.timing import clocked, in_turns
from horovod_topk.fsdp import TopKEF

Made = tuple[Any, Any, Callable[[], object]]  # units, their batch, and what draws their gradients


def linear() -> Made:
    """Make linear units."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(UNITS)))
    return model, torch.randn(1, WIDTH), lambda: None


def given(weights: Weights) -> Made:
    """Make units whose backward returns given gradients."""
    module = GivenGradients(weights, dist.get_rank(), None, 0)
    return module.units(), torch.zeros(1, requires_grad=True), module.draw


def variants(mesh: Any, name: str) -> dict[str, Callable[[], None]]:
    """Return the step of each variant, by its name."""
    rank = dist.get_rank()
    make = linear if name == "linear" else partial(given, Weights.of(specs_of(name), rank))

    def made(own: Any, compressor: Any = None, kind: str = "float32") -> Callable[[], None]:
        model, batch, draw = make()
        policy = MixedPrecisionPolicy(reduce_dtype=getattr(torch, kind))
        for unit in (*model, model):
            fully_shard(unit, mesh=own, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        if compressor is not None:
            compressor.attach(model, optimizer, between=mesh["between"])

        def step() -> None:
            draw()
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

        return step

    within = mesh["within"]
    return {
        NONE: made(within),
        "HSDP, float32": made(mesh),
        "HSDP, bfloat16": made(mesh, kind="bfloat16"),
        "TopKEF()": made(within, TopKEF(warmup=None)),
        "TopKEF(ratio=0.005)": made(within, TopKEF(ratio=0.005, warmup=None)),
    }


def measure(job: Job, args: argparse.Namespace) -> dict[str, list[float]] | None:
    """Measure each variant's steps; rank 0 returns the seconds of the slowest rank."""
    join_ranks()
    names = "between", "within"
    mesh = init_device_mesh("cpu", (dist.get_world_size() // RANKS, RANKS), mesh_dim_names=names)

    def slowest(step: Callable[[], object]) -> float:
        taken = torch.tensor(clocked(step, dist.barrier)())
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        return taken.item()

    timed = {name: partial(slowest, step) for name, step in variants(mesh, job[0]).items()}
    found, rank = in_turns(timed, args.rounds, warm_up=1), dist.get_rank()  # the first allocates
    dist.barrier()
    dist.destroy_process_group()
    return found if rank == 0 else None
