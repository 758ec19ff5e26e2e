"""The runners: one training step with each method of exchange."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from horovod_topk.cli.bench.gradients import GivenGradients
from horovod_topk.cli.bench.methods import FSDP, FSDP_BF16, HOROVODS, NONE, STEADY, Method
from horovod_topk.cli.options import ADAM, SGD

LEARNING_RATE = 1e-9  # weights nearly stay the same with any gradients
POWERSGD = "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook"
POWERSGD_RANK = 4
POWERSGD_START = 2  # the smallest value that it accepts; the steps before are dense
FILLED_POWERSGD = POWERSGD_START + 2  # steps before its exchanges are those of a long run
ONE_BUCKET = 1 << 20  # MiB, more than any model's gradients
WARM_UP = 2  # steps in which names are cached and DDP's buckets rebuilt
FILLED = 6  # steps until residuals are filled
HOOKS: dict[str, Any] = {
    "ddp-none": debugging_hooks.noop_hook,
    "ddp-fp16": default_hooks.fp16_compress_hook,
}


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Runner:
    """One method, with its own model and optimizer."""

    model: GivenGradients
    forward: nn.Module  # the model, DDP around it, or its units for FSDP2
    optimizer: Any
    warm_up: int = WARM_UP
    before_step: Callable[[], None] = _nothing

    def step(self) -> None:
        """Forward, backward, exchange and update."""
        self.forward(torch.zeros(1, requires_grad=True)).sum().backward()
        self.before_step()
        self.optimizer.step()

    def clear(self) -> None:
        """Free the gradients and draw those of the next step; not part of a timed step."""
        self.optimizer.zero_grad()
        self.model.draw()


def build(
    method: Method, model: GivenGradients, ordinal: int, optimizer: str | None = SGD, nodes: int = 2
) -> Runner:
    """Make the runner of a method.

    Args:
        ordinal: number of the runner, for unique names of collectives.
        optimizer: as `options.optimizer_of` returns it; None: SGD without momentum.
        nodes: number of nodes within which FSDP2 shards.
    """
    if method.is_fsdp:
        return _over_fsdp(method, model, optimizer, nodes)
    plain = _plain(method, model, optimizer)
    if method.kind == NONE:
        return Runner(model, model, plain)
    if method.is_local:
        return _locally(method, model, plain, f"bench.{ordinal}")
    if method.is_ddp:
        return _over_ddp(method, model, plain)
    return _over_horovod(method, model, plain, f"bench.{ordinal}")


def _plain(method: Method, trained: nn.Module, optimizer: str | None) -> torch.optim.Optimizer:
    if optimizer == ADAM:
        return torch.optim.AdamW(trained.parameters(), lr=LEARNING_RATE)
    own = method.own_momentum if optimizer == SGD else 0.0
    return torch.optim.SGD(trained.parameters(), lr=LEARNING_RATE, momentum=own)


def _over_fsdp(method: Method, model: GivenGradients, optimizer: str | None, nodes: int) -> Runner:
    """Shard the model within nodes; between them FSDP2 or a compressor reduces, or nothing does."""
    fsdp = importlib.import_module("torch.distributed.fsdp")  # takes a second
    shape = nodes, dist.get_world_size() // nodes
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    reduced = torch.bfloat16 if method.kind == FSDP_BF16 else None
    policy = fsdp.MixedPrecisionPolicy(reduce_dtype=reduced)
    own = mesh if method.kind in (FSDP, FSDP_BF16) else mesh["shard"]
    units = model.units()
    for each in (*units, units):
        fsdp.fully_shard(each, mesh=own, mp_policy=policy)
    plain = _plain(method, units, optimizer)
    if method.adapter == "fsdp":
        compressor(method).attach(units, plain, between=mesh["replicate"])
    return Runner(model, units, plain, FILLED)


def _over_ddp(method: Method, model: GivenGradients, plain: torch.optim.Optimizer) -> Runner:
    """DDP with gradients as bucket views, as its documentation recommends."""
    options: dict[str, Any] = {
        "find_unused_parameters": model.idle > 0,
        "gradient_as_bucket_view": True,
    }
    if method.kind == "powersgd":
        options["bucket_cap_mb"] = ONE_BUCKET
    wrapped = DistributedDataParallel(model, **options)
    warm_up = WARM_UP
    if method.adapter == "ddp":
        compressor(method).attach(wrapped, plain)
        warm_up = FILLED
    elif method.kind == "powersgd":
        register_powersgd(wrapped)
        warm_up = FILLED_POWERSGD
    elif method.kind in HOOKS:
        wrapped.register_comm_hook(None, HOOKS[method.kind])
    return Runner(model, wrapped, plain, warm_up)


def register_powersgd(wrapped: DistributedDataParallel) -> None:
    """Have DDP exchange gradients by PyTorch's PowerSGD hook; its first steps are dense."""
    module = importlib.import_module(POWERSGD)  # it needs NumPy
    state = module.PowerSGDState(
        process_group=None,
        matrix_approximation_rank=POWERSGD_RANK,
        start_powerSGD_iter=POWERSGD_START,
    )
    wrapped.register_comm_hook(state, module.powerSGD_hook)


def _over_horovod(
    method: Method, model: GivenGradients, plain: torch.optim.Optimizer, name: str
) -> Runner:
    hvd = importlib.import_module("horovod.torch")
    names = [(f"{name}.{own}", parameter) for own, parameter in model.named_parameters()]
    optimizer = hvd.DistributedOptimizer(plain, names, compression_of(method))
    if method.kind == "dense-waiting":
        return Runner(model, model, optimizer, before_step=lambda: _wait(optimizer))
    return Runner(model, model, optimizer, WARM_UP if method.kind in HOROVODS else FILLED)


def _locally(
    method: Method, model: GivenGradients, plain: torch.optim.Optimizer, name: str
) -> Runner:
    """An outer step after each step, on weights of its own: other runners' differ between ranks."""
    for p in model.parameters():
        p.data = torch.zeros_like(p)
    adapter = importlib.import_module(f"horovod_topk.{method.adapter}")
    named = [(f"{name}.{own}", parameter) for own, parameter in model.named_parameters()]
    optimizer = adapter.LocalSteps(plain, named, every=1, compression=compressor(method))
    return Runner(model, model, optimizer, FILLED)


def _wait(optimizer: Any) -> None:
    rest_until_done = importlib.import_module("horovod_topk.torch.collective").rest_until_done
    for handle, _ in optimizer._handles.values():
        if handle is not None:
            rest_until_done(handle)


def compression_of(method: Method) -> Any:
    """The compression to pass to Horovod's optimizer."""
    if method.kind in HOROVODS:
        return getattr(importlib.import_module("horovod.torch").Compression, HOROVODS[method.kind])
    return compressor(method)


def compressor(method: Method) -> Any:
    """Make the compressor of a method of this package."""
    adapter = importlib.import_module(f"horovod_topk.{method.adapter}")
    return getattr(adapter, method.compressor)(**STEADY, **method.settings)
