"""A rank of the benchmark `does_it_pay`: takes all variants in turns, or trains once."""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from benchmarks import does_it_pay as names
from cluster.host import INTERFACE
from horovod_topk.cli.bench.nic import scheduled
from horovod_topk.cli.bench.runners import FILLED_POWERSGD, ONE_BUCKET, register_powersgd
from horovod_topk.ddp import QSGD, Dense, LocalSteps, TopKEF
from study.large import workload
from study.loops import Loop
from study.results import Study

EVERY = 30  # inner steps of a round
VIEWS = {"gradient_as_bucket_view": True}  # as DDP's documentation recommends
WARM_UP = 2  # steps, in which memory is allocated


@dataclass(frozen=True)
class Variant:
    """A way to train.

    Attributes:
        wrap: from model and optimizer to those that a training loop uses, and to what has the
            compressor's state, or None.
        steps: number of steps that are timed at once.
        offset: number of steps of a round that come before them.
        warm_up: number of steps before.
    """

    wrap: Callable[[nn.Module, Any], tuple[nn.Module, Any, Any]]
    steps: int
    offset: int = 0
    warm_up: int = WARM_UP


def alone(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any, Any]:
    """Train without an exchange."""
    return model, optimizer, None


def ddp(register: Callable[[DistributedDataParallel], None], **options: Any) -> Any:
    """Build a variant of DDP with these options, and with what `register` gives it."""

    def wrap(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any, Any]:
        wrapped = DistributedDataParallel(model, init_sync=False, **VIEWS, **options)
        register(wrapped)
        return wrapped, optimizer, None

    return wrap


def half(wrapped: DistributedDataParallel) -> None:
    """Exchange gradients in float16."""
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)


def each_step(compressor: Any) -> Any:
    """Build a variant of DDP that exchanges gradients in every step."""

    def wrap(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any, Any]:
        wrapped = DistributedDataParallel(model, init_sync=False, **VIEWS)
        compressor.attach(wrapped, optimizer)
        return wrapped, optimizer, wrapped

    return wrap


def local(**settings: Any) -> Any:
    """Build a variant of `LocalSteps` with these settings."""

    def wrap(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any, Any]:
        outer = LocalSteps(optimizer, model.named_parameters(), **settings)
        return model, outer, outer

    return wrap


VARIANTS = {
    names.ALONE: Variant(alone, EVERY),
    names.FLOAT32: Variant(ddp(lambda _: None), 3),
    names.FLOAT16: Variant(ddp(half), 4),
    names.BFLOAT16: Variant(each_step(Dense(values="bfloat16")), 4),
    names.POWERSGD: Variant(
        ddp(register_powersgd, bucket_cap_mb=ONE_BUCKET), 10, warm_up=FILLED_POWERSGD
    ),
    names.QSGD: Variant(each_step(QSGD(bits=2, exchange="sharded")), 10),
    names.TOPK: Variant(each_step(TopKEF(warmup=None)), 10),
    names.SHARDED: Variant(each_step(TopKEF(warmup=None, exchange="sharded")), 10),
    names.LOCAL: Variant(local(every=EVERY), EVERY),
    names.LOCAL_10: Variant(local(every=10), EVERY),
    # The exchange starts and ends within the steps that are timed.
    names.LATE: Variant(local(every=EVERY, delay=10), EVERY, EVERY // 2),
    names.PLAIN: Variant(local(every=EVERY, compression=Dense), EVERY),
}

EARLY = {
    names.TOPK: Variant(each_step(TopKEF()), names.EARLY, warm_up=0),
    names.SHARDED: Variant(each_step(TopKEF(exchange="sharded")), names.EARLY, warm_up=0),
}


def timed(variant: Variant, loop: Loop, rows: int) -> dict[str, float]:
    """Build a variant, and measure its steps: the seconds of the slowest rank, a step."""
    torch.manual_seed(0)
    plain = loop.model()
    fused = loop.optimizer(plain)
    for group in fused.param_groups:
        group["fused"] = True
    model, optimizer, owner = variant.wrap(plain, fused)
    batch = tuple(column[:rows] for column in next(loop.batches(dist.get_rank(), 1, 0)))

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            loop.loss(model, batch).backward()
            optimizer.step()

    def counted() -> Tensor:
        stats = None if owner is None else TopKEF.of(owner).stats()
        parts = [0.0 if stats is None else getattr(stats, each) for each in names.PARTS]
        sent = scheduled(INTERFACE)
        assert sent is not None
        return torch.tensor([sent.bytes, *parts], dtype=torch.float64)

    train(variant.warm_up)
    if isinstance(optimizer, LocalSteps):
        optimizer.synchronize()  # allocates, and begins a round
    train(variant.offset)
    dist.barrier()
    before, began = counted(), time.perf_counter()
    train(variant.steps)
    slowest = torch.tensor(time.perf_counter() - began)
    means = counted() - before
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    dist.all_reduce(means)
    sent, *parts = (means / dist.get_world_size() / variant.steps).tolist()
    exchange = sent if owner is None else TopKEF.of(owner).stats().sent_bytes
    return {
        "seconds": slowest.item() / variant.steps,
        "bytes": sent,
        "exchange": exchange,
        **dict(zip(names.PARTS, parts, strict=True)),
    }


def in_turns(job: names.Job, rounds: int) -> dict[str, Any]:
    """Measure all variants, round after round."""
    loop = loop_of(job.case)
    found: dict[str, dict[str, list[float]]] = {name: {} for name in job.variants}
    for _ in range(1 if job.early else rounds):
        for name, each in found.items():
            measured = timed((EARLY if job.early else VARIANTS)[name], loop, job.rows)
            gc.collect()
            for key, value in measured.items():
                each.setdefault(key, []).append(value)
            said(f"{name}: {measured['seconds']:.2f} s a step")
    return {"variants": found}


def whole() -> dict[str, Any]:
    """Train with TopKEF as the simulated run does: same data, weights, steps and scores.

    The clock stops while rank 0 scores.
    """
    loop, seed = loop_of("byte GPT*"), 0
    torch.manual_seed(seed)
    plain = loop.model()
    optimizer = loop.optimizer(plain)
    model, optimizer, owner = each_step(TopKEF())(plain, optimizer)
    schedule = loop.schedule(optimizer)
    batches = loop.batches(dist.get_rank(), dist.get_world_size(), seed)
    points, spent = [], 0.0
    for step in range(1, loop.steps + 1):
        began = time.perf_counter()
        batch = next(batches)
        optimizer.zero_grad()
        loop.loss(model, batch).backward()
        optimizer.step()
        schedule.step()
        spent += time.perf_counter() - began
        if step % loop.every == 0 or step == loop.steps:
            if dist.get_rank() == 0:
                with torch.no_grad():
                    points.append({"step": step, "seconds": spent, **loop.score(plain)})
                said(f"{points[-1]}")
            dist.barrier()
    return {"points": points, "sent": TopKEF.of(owner).stats().sent_bytes}


def loop_of(case: str) -> Loop:
    """Return the training loop of one of the study's cases."""
    return workload(**Study("does_it_pay").found(case).settings.options)


def said(line: str) -> None:
    """Print a line on rank 0."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def join_ranks() -> None:
    """Begin torch.distributed on the ranks of horovodrun; the first host has the store."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "host1", "MASTER_PORT": "29557"}
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    rank, ranks = (int(os.environ[name]) for name in ("HOROVOD_RANK", "HOROVOD_SIZE"))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)


def measure(job: names.Job, args: argparse.Namespace) -> dict[str, Any] | None:
    """Measure or train; rank 0 returns the results."""
    join_ranks()
    found, rank = whole() if job.whole else in_turns(job, args.rounds), dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    return found if rank == 0 else None
