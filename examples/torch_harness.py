"""Code that the PyTorch examples share, so that each reads as an ordinary Horovod script."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import harness
import horovod.torch as hvd
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset


def compression(args: argparse.Namespace) -> Any:
    """Return the `compression` for `hvd.DistributedOptimizer`."""
    if args.compression == "topk":
        # Imported here and not above, so that the other two run a Horovod nobody has touched.
        from horovod_topk.torch import TopKEF

        return TopKEF(**harness.topk_settings(args))
    return getattr(hvd.Compression, args.compression)


def optimizer(args: argparse.Namespace, model: nn.Module) -> Optimizer:
    """Return the optimizer that the arguments name, before Horovod wraps it."""
    momentum = harness.own_momentum(args)
    if args.optimizer == "adamw":
        return AdamW(model.parameters(), lr=args.lr, betas=(momentum, 0.999))
    return SGD(model.parameters(), lr=args.lr, momentum=momentum)


def local_steps(args: argparse.Namespace, model: nn.Module, inner: Optimizer) -> Any:
    """Return an optimizer that exchanges movements every `--local-steps` steps."""
    from horovod_topk.torch import Dense, LocalSteps

    dense = {"none": Dense(), "fp16": Dense(values="float16")}
    compressor = dense.get(args.compression) or compression(args)
    named = model.named_parameters()
    return LocalSteps(inner, named, every=args.local_steps, compression=compressor)


def batches(*columns: Tensor, batch_size: int, seed: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield batches of this rank's share of the rows for ever, shuffled in each epoch."""
    return batches_of(hvd.rank(), hvd.size(), *columns, batch_size=batch_size, seed=seed)


def batches_of(
    rank: int, ranks: int, *columns: Tensor, batch_size: int, seed: int
) -> Iterator[tuple[Tensor, ...]]:
    """Yield the batches of any rank. Their order depends on the arguments alone."""
    rows = TensorDataset(*columns)
    share: DistributedSampler[Any] = DistributedSampler(
        rows, num_replicas=ranks, rank=rank, seed=seed, drop_last=True
    )
    loader = DataLoader(rows, batch_size=None, sampler=BatchSampler(share, batch_size, True))
    if not len(loader):
        raise SystemExit(f"--batch-size {batch_size}: a rank has only {len(share)} examples")
    epoch = 0
    while True:
        share.set_epoch(epoch)
        yield from loader
        epoch += 1


@torch.no_grad()
def mean_over_rows(score: Callable[..., Tensor], *columns: Tensor, batch_size: int = 256) -> float:
    """Return the mean of `score(*columns)`, one value a row; each rank scores its share of rows."""
    share = [column[hvd.rank() :: hvd.size()] for column in columns]
    total = torch.zeros(2, dtype=torch.float64)
    for batch in zip(*(column.split(batch_size) for column in share), strict=True):
        scores = score(*batch)
        total += torch.tensor([scores.double().sum(), len(scores)])
    total = hvd.allreduce(total, op=hvd.Sum, name="mean_over_rows")
    return (total[0] / total[1]).item()


def allreduce_bytes(model: nn.Module, compression: str) -> int:
    """Return the bytes that a rank sends in a ring allreduce of the gradients."""
    size = sum(
        p.numel() * (2 if compression == "fp16" else p.element_size())
        for p in model.parameters()
        if p.requires_grad
    )
    return harness.ring_bytes(size, hvd.size())


def sent_bytes(args: argparse.Namespace, model: nn.Module, optimizer: Optimizer) -> int:
    """Return the bytes that a rank sends in a step, with the compression of the arguments."""
    every = getattr(args, "local_steps", None) or 1
    if args.compression == "topk" or every > 1:
        from horovod_topk.torch import TopKEF

        return TopKEF.of(optimizer).stats().sent_bytes // every
    return allreduce_bytes(model, args.compression)


def describe(args: argparse.Namespace, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the run's settings and the bytes it sends, for its JSON file."""
    return harness.describe(
        args,
        ranks=hvd.size(),
        parameters=sum(p.numel() for p in model.parameters()),
        sent_bytes=sent_bytes(args, model, optimizer),
        dense_bytes=allreduce_bytes(model, "none"),
        versions={"torch": torch.__version__},
    )


def mean_over_ranks(values: list[float]) -> float:
    """Return the mean of all ranks' values; each rank has the same number of values."""
    return hvd.allreduce(torch.tensor(values), name="losses").mean().item()


class Run(harness.Loop):
    """The record of one training run; see `harness.Loop`."""

    def __init__(self, args: argparse.Namespace, model: nn.Module, optimizer: Optimizer) -> None:
        of_this = partial(describe, args, model, optimizer)
        super().__init__(args, hvd.rank(), of_this, mean_over_ranks)
