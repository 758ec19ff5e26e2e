"""The simulated ranks of `horovod-topk compare` against real ones, on the digits."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import pytest
import torch
from torch import nn

from horovod_topk.cli.compare.simulated.training import Job
from horovod_topk.core.run.substitute import VARIABLE, parse
from plain import PlainTopKEF as TopKEF
from study.workloads import Study, workload
from witness import assert_close, bits

SEED, STEPS = 3, 15


def task(optimizer: str) -> Study:
    lr = 0.1 if optimizer == "sgd" else 0.002
    return workload(task="digits", optimizer=optimizer, shards="equal", lr=lr, steps=STEPS)


def simulated(optimizer: str, compressor: str) -> nn.Module:
    job = Job(task(optimizer), parse(compressor), hvd.size(), SEED)
    for _ in range(STEPS):
        job.step()
    return job.model


def trained(optimizer: str, compression: Any) -> nn.Module:
    """As examples/pytorch_digits.py trains it."""
    torch.manual_seed(SEED)
    study = task(optimizer)
    model = study.model()
    distributed = hvd.DistributedOptimizer(
        study.optimizer(model), named_parameters=model.named_parameters(), compression=compression
    )
    schedule = study.schedule(distributed)
    source = study.batches(hvd.rank(), hvd.size(), SEED)
    for _ in range(STEPS):
        distributed.zero_grad()
        study.loss(model, next(source)).backward()
        distributed.step()
        schedule.step()
    return model


@pytest.mark.world_size(2, 4)
@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        ("sgd", "TopKEF(ratio=0.01)"),
        ("adamw", "TopKEF(ratio=0.01, values='sign')"),
        ("sgd", "TopKEF(ratio=0.01, values='int4', exchange='sharded')"),
        ("sgd", "Dense(values='bfloat16')"),
    ],
)
def test_weights_are_those_of_real_ranks_to_the_bit(
    optimizer: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, text)
    real = trained(optimizer, TopKEF)
    if hvd.rank() == 0:  # the simulation needs no others
        found = simulated(optimizer, text)
        assert torch.equal(bits(found.parameters()), bits(real.parameters()))


@pytest.mark.world_size(2, 4)
def test_dense_weights_are_those_of_horovods_allreduce() -> None:
    real = trained("sgd", hvd.Compression.none)
    if hvd.rank() == 0:
        assert_close(list(simulated("sgd", "none").parameters()), list(real.parameters()))
