"""Ratios that some parameters have of their own, between real ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import training
from horovod_topk.errors import ConfigError, PlanMismatchError
from plain import PlainTopKEF as TopKEF
from resuming import assert_resumes
from training import Setup
from witness import assert_ranks_equal, assert_same_history, residuals
from world import hvd

HEAD = ["net.3.weight", "net.3.bias"]
RULES = {"net.3.*": "dense", lambda name, shape: shape == (33, 20): 0.3, "*": 0.05}
PLAIN = Setup(optimizer=training.plain_sgd)


def grouped(**settings: Any) -> TopKEF:
    return TopKEF(**{"ratio": RULES, "min_numel": 0, **settings})


@pytest.mark.everywhere
@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
def test_all_tensors_dense_equal_dense(exchange: str) -> None:
    dense = training.trajectory(Setup(), hvd.Compression.none, 12)
    ours = training.trajectory(
        Setup(), grouped(ratio={"?*": "dense", "*": 0.05}, exchange=exchange), 12
    )
    assert_same_history(ours, dense)


@pytest.mark.everywhere
@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize(
    "settings", [{}, {"exchange": "sharded", "ratio": {**RULES, "*": (0.05, 0.2)}}], ids=str
)
@pytest.mark.parametrize("selection", ["exact", "sampled"])
def test_a_dense_group_beside_a_sparse_one(settings: dict[str, Any], selection: str) -> None:
    task = PLAIN.task()
    optimizer = PLAIN.distributed(task, grouped(selection=selection, **settings))
    for step in range(3):
        optimizer.zero_grad()
        task.loss(hvd.rank(), step).backward()
        mine = dict(zip(HEAD, gradients(task, hvd.rank(), step), strict=True))
        optimizer.synchronize()
        for name, parameter in task.named_parameters():
            if name in HEAD:
                mean = hvd.allreduce(mine[name], name=f"{name}.mean")
                torch.testing.assert_close(parameter.grad, mean, rtol=1e-5, atol=1e-7)
            else:
                sent = int(torch.count_nonzero(parameter.grad))
                assert 0 < sent < parameter.numel() or parameter.numel() < 34
        with optimizer.skip_synchronize():
            optimizer.step()
    owed = {name: bool(e.any()) for name, e in residuals(optimizer).items()}
    assert owed == {name: name not in HEAD for name, _ in task.named_parameters()}
    assert TopKEF.of(optimizer).stats().ratios == dict.fromkeys(HEAD, 1.0) | {"net.0.weight": 0.3}
    assert_ranks_equal(task.parameters())


def gradients(task: Any, rank: int, step: int) -> list[torch.Tensor]:
    """This rank's own, of the head: those in `.grad` belong to the exchange."""
    parameters = dict(task.named_parameters())
    return list(torch.autograd.grad(task.loss(rank, step), [parameters[name] for name in HEAD]))


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize(
    "settings",
    [
        {"momentum": 0.9},
        {"values": "int8", "exchange": "sharded", "momentum": 0.9},
        {"warmup": [(2, 0.2), (4, 0.1)]},
    ],
    ids=str,
)
def test_a_run_goes_on_from_its_checkpoint(
    settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    pytest.importorskip("safetensors")
    folder = tmp_path_factory.mktemp("ratios")
    assert_resumes(PLAIN, partial(grouped, **settings), folder)


def test_warm_up_and_a_dense_step() -> None:
    task = PLAIN.task()
    compressor = grouped(warmup=[(2, 0.5)])
    optimizer = PLAIN.distributed(task, compressor)
    training.ordinary(task, optimizer, 0)
    assert compressor.stats().ratios == dict.fromkeys(HEAD, 1.0)
    for step in (1, 2):
        training.ordinary(task, optimizer, step)
    assert compressor.stats().ratios == dict.fromkeys(HEAD, 1.0) | {"net.0.weight": 0.3}
    assert compressor.stats().residual_norm > 0
    compressor.set_ratio(1.0)
    training.ordinary(task, optimizer, 3)
    assert compressor.stats().residual_norm == 0


@pytest.mark.everywhere
@pytest.mark.world_size(4)
def test_dense_between_nodes_too() -> None:
    task = PLAIN.task()
    settings = {"exchange": "hierarchical", "ratio": {"?*": "dense", "*": 0.05}}
    optimizer = PLAIN.distributed(task, grouped(**settings))
    for step in range(3):
        training.ordinary(task, optimizer, step)
    assert TopKEF.of(optimizer).stats().residual_norm == 0
    assert_ranks_equal(task.parameters())


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("odd", [{"net.3.weight": 0.5}, {}], ids=["another", "none"])
def test_ranks_that_differ_are_told_of_which_tensor(odd: Any) -> None:
    last = hvd.size() - 1
    rules = odd if hvd.rank() == last else {"net.3.weight": 0.25}
    with pytest.raises(PlanMismatchError, match="ranks disagree on ratios:") as raised:
        PLAIN.distributed(PLAIN.task(), grouped(ratio={**rules, "*": 0.05}))
    assert '["net.3.weight", 0.25] on rank' in str(raised.value)
    assert f'["net.3.weight", {0.5 if odd else 0.05}] on rank {last}' in str(raised.value)


def test_a_pattern_that_matches_no_parameter_is_refused() -> None:
    task = PLAIN.task()
    with pytest.raises(ConfigError, match=r"'head\.\*' matches none of 6 tensors"):
        PLAIN.distributed(task, grouped(ratio={"head.*": "dense"}))


def test_frozen_parameters_may_be_named() -> None:
    task = PLAIN.task()
    parameters = dict(task.named_parameters())
    parameters["net.0.weight"].requires_grad_(False)
    optimizer = PLAIN.distributed(task, grouped(ratio={"net.0.*": 0.5, "*": 0.05}))
    training.ordinary(task, optimizer, 0)
    assert TopKEF.of(optimizer).stats().ratios == {"net.0.bias": 0.5}
