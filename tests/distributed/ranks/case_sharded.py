"""The sharded exchange between real ranks: equal bits, nothing lost, dense at ratio 1."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
import torch
from torch import Tensor

import training
from horovod_topk.errors import StateDictError
from plain import PlainTopKEF as TopKEF
from training import Setup
from witness import assert_close, assert_ranks_equal, assert_residuals, bits, residuals, spoiled
from world import hvd

pytestmark = pytest.mark.everywhere

SETTINGS = [
    {"values": "float32"},
    {"values": "int8"},
    {"values": "int4", "ratio": (0.1, 0.02)},
    {"values": "sign", "min_numel": 300},
]


def sharded(**settings: Any) -> TopKEF:
    return TopKEF(**{"ratio": 0.1, "min_numel": 0, "exchange": "sharded", **settings})


@pytest.mark.everywhere(one_in=3)
@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("build", [training.perceptron, training.Branches])
def test_ranks_end_equal_and_what_was_not_applied_is_kept(build: Any, settings: Any) -> None:
    """Without a momentum or a weight decay, the parameters are the sum of what was applied."""
    setup = Setup(build=build, optimizer=training.plain_sgd)
    task, dense = setup.task(), setup.task()
    optimizer = setup.distributed(task, sharded(**settings))
    given = [torch.zeros_like(p) for p in task.parameters()]
    start = training.snapshot(task)
    for step in range(6):
        optimizer.zero_grad()
        task.loss(hvd.rank(), step).backward()
        dense.load_state_dict(task.state_dict())
        dense.zero_grad()
        dense.loss(hvd.rank(), step).backward()
        optimizer.step()
        for i, p in enumerate(dense.parameters()):
            if p.grad is not None:
                given[i] += hvd.allreduce(p.grad, name=f"given.{i}")
    assert_ranks_equal(task.parameters())
    applied = [(a - p.detach()) / 0.05 for a, p in zip(start, task.parameters(), strict=True)]
    owed = kept(task, optimizer)
    for got, left, whole in zip(applied, owed, given, strict=True):
        torch.testing.assert_close(got + left, whole, rtol=1e-4, atol=1e-4)
    assert any(left.abs().max() > 0 for left in owed)


def kept(task: Any, optimizer: Any) -> list[Tensor]:
    """Mean of the ranks' residuals, and the owners' at their elements."""
    state = TopKEF.of(optimizer).state_dict()
    total = []
    for name, p in task.named_parameters():
        own = torch.zeros(p.numel())
        places = places_of(name, p.numel(), hvd.rank())
        own[places] = state["owned"]["residuals"][name]
        mean = hvd.allreduce(state["residuals"][name], name=f"mean.{name}")
        total.append((mean + hvd.allreduce(own, op=hvd.Sum, name=f"own.{name}")).view_as(p))
    return total


def places_of(name: str, numel: int, rank: int) -> Tensor:
    """Which elements of a tensor a rank owns, from the docstring of `core.shards`."""
    block = torch.arange(numel) // 512
    first = (rank - zlib.crc32(name.encode())) % hvd.size()
    return (block % hvd.size() == first).nonzero().squeeze(1)


@pytest.mark.world_size(2, 3)
def test_dense_at_ratio_one() -> None:
    setup = Setup()
    ours = training.trajectory(setup, sharded(ratio=1.0), steps=25)
    dense = training.trajectory(setup, hvd.Compression.none, steps=25)
    assert_close(ours[-1], dense[-1])


@pytest.mark.world_size(2, 3)
def test_a_step_with_a_nan_leaves_all_residuals_as_they_were() -> None:
    setup = Setup()
    task = setup.task()
    optimizer = setup.distributed(task, sharded(values="int8"))
    training.ordinary(task, optimizer, 0)
    before, owned = residuals(optimizer), TopKEF.of(optimizer).state_dict()["owned"]["residuals"]
    optimizer.zero_grad()
    weight = next(iter(task.parameters()))
    with spoiled(weight, float("nan") if hvd.rank() == 0 else 0.0, position=3):
        task.loss(hvd.rank(), 1).backward()
    optimizer.synchronize()
    assert weight.grad is not None and weight.grad.isnan().all()
    with optimizer.skip_synchronize():
        optimizer.step()
    assert_residuals(optimizer, before)
    now = TopKEF.of(optimizer).state_dict()["owned"]["residuals"]
    assert all(torch.equal(bits([now[name]]), bits([owned[name]])) for name in owned)


def test_a_state_dict_carries_a_run_over() -> None:
    setup = Setup(optimizer=training.plain_sgd)
    first, second = setup.task(), setup.task()
    one, other = (setup.distributed(task, sharded(values="int4")) for task in (first, second))
    for step in range(3):
        training.ordinary(first, one, step)
    second.load_state_dict(first.state_dict())
    TopKEF.of(other).load_state_dict(TopKEF.of(one).state_dict())
    for step in range(3, 6):
        training.ordinary(first, one, step)
        training.ordinary(second, other, step)
    assert torch.equal(bits(first.parameters()), bits(second.parameters()))
    state = TopKEF.of(one).state_dict()
    state["owned"]["rank"] = 1 - hvd.rank()
    with pytest.raises(StateDictError, match="that own shards, this is rank"):
        TopKEF.of(other).load_state_dict(state)


def test_stats_say_how_it_travels() -> None:
    task = Setup().task()
    optimizer = Setup().distributed(task, sharded(values="int8"))
    training.ordinary(task, optimizer, 0)
    stats = TopKEF.of(optimizer).stats()
    assert (stats.exchange, stats.ranks, stats.steps) == ("sharded", 2, 1)
    assert stats.payload_bytes == 3 * stats.sent_bytes // 2  # two of three payloads are for others
    assert stats.residual_norm > 0
    kept = TopKEF.of(optimizer).state_dict()["owned"]["residuals"].values()
    assert stats.owned_norm == pytest.approx(float(torch.cat(list(kept)).norm()), rel=1e-5)
    assert stats.owned_norm > 0
