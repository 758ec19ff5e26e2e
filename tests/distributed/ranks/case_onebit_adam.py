"""OneBitAdam on real ranks: checkpoints, overflows, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from torch import nn

import horovod_topk.torch
import training
from case_onebit_lamb import FREEZE, SMALL
from horovod_topk.errors import ConfigError, UnsupportedOperationError
from horovod_topk.torch import OneBitAdam, OneBitLamb, SignSGD
from plain import PlainTopKEF as TopKEF
from resuming import assert_resumes
from training import Task
from witness import assert_ranks_equal, bits


def start(
    make: Callable[[], Task] = training.perceptron,
    compression: Any = None,
    horovod: Any = None,
    kind: Any = OneBitAdam,
    **settings: Any,
) -> tuple[Any, Any]:
    torch.manual_seed(0)
    task = make()
    optimizer = kind(task.parameters(), **{"freeze_after": FREEZE, "lr": 0.01, **settings})
    if compression is None:
        compression = SignSGD(exchange="sharded", min_numel=SMALL)
    named = task.named_parameters()
    options = {"named_parameters": named, "compression": compression, **(horovod or {})}
    return task, hvd.DistributedOptimizer(optimizer, **options)


def test_it_needs_no_compression() -> None:
    """Left out, it is signs over the sharded exchange, dense until the variance is frozen."""
    task = training.Regression(nn.Linear(64, 64), (8, 64))
    optimizer = OneBitAdam(task.parameters(), freeze_after=2)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=task.named_parameters())
    sent = []
    TopKEF.of(optimizer).on_step(lambda counters: sent.append(counters.sent_bytes))
    training.train(task, optimizer, range(4))
    assert sent[0] == sent[1] > 5 * sent[2] == 5 * sent[3]
    assert (TopKEF.of(optimizer).stats().exchange, optimizer.param_groups[0]["lr"]) == (
        "sharded",
        1e-3,
    )
    assert_ranks_equal(task.parameters())


COMPRESSORS = {
    "signs, gathered": ("SignSGD", {"exchange": "allgather"}),
    "top-k": ("TopKEF", {"ratio": 0.1}),
    "powersgd": ("PowerSGD", {"rank": 1}),
    "bytes": ("ByteGrad", {}),
}


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("name", [None, *COMPRESSORS])
def test_a_run_goes_on_from_a_checkpoint_to_the_bit(name: str | None, tmp_path: Path) -> None:
    def made() -> tuple[Any, Any]:
        if name is None:
            return start()
        method, settings = COMPRESSORS[name]
        return start(compression=getattr(horovod_topk.torch, method)(min_numel=SMALL, **settings))

    assert_resumes(made, tmp_path)


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("kind", [OneBitAdam, OneBitLamb])
def test_an_overflow_on_one_rank_changes_nothing(kind: Any) -> None:
    """With a loss scaler: the momentum, and both errors, are without its scale."""
    runs = []
    for scale in (1.0, 1024.0):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
        compression = SignSGD(exchange="sharded", min_numel=SMALL, grad_scaler=scaler)
        runs.append((*start(compression=compression, kind=kind), scaler))
    for step in range(8):
        for task, optimizer, scaler in runs:
            for bad in [True, False] if step in (1, 5) else [False]:
                before = bits(task.parameters()).clone()
                scale = scaler.get_scale()
                optimizer.zero_grad()
                factor = float("inf") if bad and hvd.rank() == 1 else 1.0
                scaler.scale(task.loss(hvd.rank(), step) * factor).backward()
                optimizer.synchronize()
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
                scaler.update(scale)
                assert torch.equal(bits(task.parameters()), before) == bad
    (first, *_), (second, optimizer, _) = runs
    assert TopKEF.of(optimizer).stats().rolled_back == 2
    for mine, there in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(mine, there, rtol=1e-5, atol=1e-6)
    assert_ranks_equal(second.parameters())


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "fp16": ({"compression": hvd.Compression.fp16}, "has Horovod exchange gradients"),
    "terngrad": ({"compression": horovod_topk.torch.TernGrad}, "has no error feedback"),
    "qsgd": ({"compression": horovod_topk.torch.QSGD(bits=2)}, "has no error feedback"),
    "momentum": ({"compression": SignSGD(momentum=0.9)}, "no momentum that it is known to stand"),
    "warm-up": ({"compression": TopKEF(0.1, warmup=100)}, "compresses gradients in the first 3"),
    "short": ({"compression": SignSGD(warmup=[(2, 1.0)])}, "compresses gradients in the first 3"),
    "sum": ({"op": hvd.Sum}, "would add up"),
    "adasum": ({"op": hvd.Adasum}, "Adasum"),
}


@pytest.mark.parametrize("refused", REFUSED)
@pytest.mark.parametrize("kind", [OneBitAdam, OneBitLamb])
def test_what_is_not_sound_is_refused_before_the_first_step(kind: Any, refused: str) -> None:
    task, (options, message) = training.perceptron(), REFUSED[refused]
    optimizer = kind(task.parameters(), freeze_after=FREEZE)
    named = task.named_parameters()
    with pytest.raises((ConfigError, UnsupportedOperationError), match=message):
        hvd.DistributedOptimizer(optimizer, named_parameters=named, **options)


def test_an_elastic_job_needs_an_exchange_without_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    with pytest.raises(ConfigError, match="this job is elastic"):
        start()
