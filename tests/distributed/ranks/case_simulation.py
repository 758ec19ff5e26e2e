"""The frontier's simulated ranks (scripts/study/frontier) against real ones, on the digits."""

from __future__ import annotations

import argparse
from typing import Any

import harness
import horovod.torch as hvd
import pytest
import pytorch_digits
import torch
import torch_harness
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from horovod_topk.torch import TopKEF
from study.frontier.cells import DENSE, Cell
from study.frontier.training import Job
from witness import assert_close, bits

STEPS = 15


def cell(exchange: str, values: str, optimizer: str = "sgd", momentum: float = 0.0) -> Cell:
    lr = 0.1 if optimizer == "sgd" else 0.002
    shared = {"ratio": 0.01, "lr": lr, "steps": STEPS, "seed": 3, "ranks": hvd.size()}
    return Cell("digits", optimizer, "equal", exchange, values, momentum=momentum, **shared)


def simulated(cell: Cell) -> nn.Module:
    job = Job(cell)
    for _ in range(cell.steps):
        job.step()
    return job.model


def trained(cell: Cell, compression: Any, batch_size: int) -> nn.Module:
    """As examples/pytorch_digits.py trains it."""
    torch.manual_seed(cell.seed)
    model = pytorch_digits.DigitsCNN()
    settings = argparse.Namespace(
        compression="topk", optimizer=cell.optimizer, lr=cell.lr, momentum=cell.momentum
    )
    optimizer = hvd.DistributedOptimizer(
        torch_harness.optimizer(settings, model),
        named_parameters=model.named_parameters(),
        compression=compression,
    )
    schedule = LambdaLR(optimizer, harness.warmup_cosine(cell.steps))
    rows = pytorch_digits.digits("training")
    source = torch_harness.batches(*rows, batch_size=batch_size, seed=cell.seed)
    for _ in range(cell.steps):
        images, labels = next(source)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        schedule.step()
    return model


@pytest.mark.world_size(2, 4)
@pytest.mark.parametrize(
    ("exchange", "values", "optimizer", "momentum"),
    [
        ("allgather", "float32", "sgd", 0.0),
        ("allgather", "sign", "adamw", 0.0),
        ("sharded", "int4", "sgd", 0.9),
    ],
)
def test_weights_are_those_of_real_ranks_to_the_bit(
    exchange: str, values: str, optimizer: str, momentum: float
) -> None:
    wanted = cell(exchange, values, optimizer, momentum)
    settings = {"values": values, "exchange": exchange, "momentum": momentum}
    compression = TopKEF(ratio=wanted.ratio, **settings)
    real = trained(wanted, compression, batch_size=16)
    if hvd.rank() == 0:  # the simulation needs no others
        assert torch.equal(bits(simulated(wanted).parameters()), bits(real.parameters()))


@pytest.mark.world_size(2, 4)
def test_dense_weights_are_those_of_horovods_allreduce() -> None:
    wanted = cell(DENSE, "float32")
    real = trained(wanted, hvd.Compression.none, batch_size=16)
    if hvd.rank() == 0:
        assert_close(list(simulated(wanted).parameters()), list(real.parameters()))
