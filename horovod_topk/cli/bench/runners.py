"""The runners: one training step with each method of exchange."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks
from torch.nn.parallel import DistributedDataParallel

from horovod_topk.cli.bench.gradients import GivenGradients
from horovod_topk.cli.bench.methods import OTHER, STEADY, TOPK, Method
from horovod_topk.cli.options import ADAM, SGD

LEARNING_RATE = 1e-9  # weights nearly stay the same with any gradients
POWERSGD = "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook"
POWERSGD_RANK = 4
POWERSGD_START = 2  # the smallest value that it accepts; the steps before are dense
ONE_BUCKET = 1 << 20  # MiB, more than any model's gradients


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Runner:
    """One method, with its own model and optimizer."""

    model: GivenGradients
    forward: nn.Module  # the model, or DDP around it
    optimizer: Any
    warm_up: int = 2  # steps in which names are cached and DDP's buckets rebuilt
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
    method: Method, model: GivenGradients, ordinal: int, optimizer: str | None = SGD
) -> Runner:
    """Make the runner of a method.

    Args:
        method: the method.
        model: the runner's model.
        ordinal: number of the runner, for unique names of collectives.
        optimizer: the optimizer, as `options.optimizer_of` returns it; None: SGD without momentum.
    """
    plain: Plain
    if optimizer == ADAM:
        plain = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    else:
        own = method.own_momentum if optimizer == SGD else 0.0
        plain = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=own)
    return BUILDERS[method.kind](method, model, plain, f"bench.{ordinal}")


Plain = torch.optim.Optimizer


def _none(method: Method, model: GivenGradients, plain: Plain, name: str) -> Runner:
    return Runner(model, model, plain)


def _distributed(model: GivenGradients, plain: Plain, name: str, compression: Any) -> Any:
    names = [(f"{name}.{own}", parameter) for own, parameter in model.named_parameters()]
    hvd = importlib.import_module("horovod.torch")
    if isinstance(compression, str):
        compression = getattr(hvd.Compression, compression)
    return hvd.DistributedOptimizer(plain, named_parameters=names, compression=compression)


def _dense(method: Method, model: GivenGradients, plain: Plain, name: str) -> Runner:
    return Runner(model, model, _distributed(model, plain, name, "none"))


def _dense_waiting(method: Method, model: GivenGradients, plain: Plain, name: str) -> Runner:
    optimizer = _distributed(model, plain, name, "none")
    rest_until_done = importlib.import_module("horovod_topk.torch.collective").rest_until_done

    def wait() -> None:
        for handle, _ in optimizer._handles.values():
            if handle is not None:
                rest_until_done(handle)

    return Runner(model, model, optimizer, before_step=wait)


def _fp16(method: Method, model: GivenGradients, plain: Plain, name: str) -> Runner:
    return Runner(model, model, _distributed(model, plain, name, "fp16"))


def compressor(method: Method) -> Any:
    """Make the compressor of a method of this package."""
    adapter = importlib.import_module(f"horovod_topk.{method.adapter}")
    return getattr(adapter, method.compressor)(**STEADY, **method.settings)


def _ours(method: Method, model: GivenGradients, plain: Plain, name: str) -> Runner:
    if method.adapter == "ddp":
        wrapped = _data_parallel(model)
        compressor(method).attach(wrapped, plain)
        return Runner(model, wrapped, plain, warm_up=6)
    optimizer = _distributed(model, plain, name, compressor(method))
    return Runner(model, model, optimizer, warm_up=6)  # until residuals are filled


def _ddp(method: Method, model: GivenGradients, plain: Plain, name: str) -> Runner:
    return Runner(model, _data_parallel(model), plain)


def _ddp_none(method: Method, model: GivenGradients, plain: Plain, name: str) -> Runner:
    return _ddp_hooked(model, plain, debugging_hooks.noop_hook)


def _ddp_fp16(method: Method, model: GivenGradients, plain: Plain, name: str) -> Runner:
    return _ddp_hooked(model, plain, default_hooks.fp16_compress_hook)


def _ddp_hooked(model: GivenGradients, plain: Plain, hook: Callable[..., Any]) -> Runner:
    wrapped = _data_parallel(model)
    wrapped.register_comm_hook(None, hook)
    return Runner(model, wrapped, plain)


def _powersgd(method: Method, model: GivenGradients, plain: Plain, name: str) -> Runner:
    powerSGD_hook = importlib.import_module(POWERSGD)  # noqa: N806  # it needs NumPy
    wrapped = _data_parallel(model, bucket_cap_mb=ONE_BUCKET)
    state = powerSGD_hook.PowerSGDState(
        process_group=None,
        matrix_approximation_rank=POWERSGD_RANK,
        start_powerSGD_iter=POWERSGD_START,
    )
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return Runner(model, wrapped, plain, warm_up=POWERSGD_START + 2)


def _data_parallel(model: GivenGradients, **rest: Any) -> DistributedDataParallel:
    """Wrap a model in DDP with gradients as bucket views, as its documentation recommends."""
    options = {"find_unused_parameters": model.idle > 0, "gradient_as_bucket_view": True, **rest}
    return DistributedDataParallel(model, **options)


BUILDERS: dict[str, Callable[[Method, GivenGradients, Plain, str], Runner]] = {
    "none": _none,
    "dense": _dense,
    "dense-waiting": _dense_waiting,
    "fp16": _fp16,
    "ddp": _ddp,
    "ddp-none": _ddp_none,
    "ddp-fp16": _ddp_fp16,
    "powersgd": _powersgd,
    TOPK: _ours,
    OTHER: _ours,
}
