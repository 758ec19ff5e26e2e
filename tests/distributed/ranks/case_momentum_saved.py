"""Checkpoints between training with and without compression, while a momentum is taken over."""

from __future__ import annotations

import copy
import math
from typing import Any

import horovod.torch as hvd
import pytest
import torch

import training
from plain import PlainTopKEF as TopKEF
from training import Setup
from witness import assert_same


def heavy_ball(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def auto(**settings: Any) -> TopKEF:
    given = {"ratio": 0.1, "min_numel": 0, "momentum": "auto", "follow_lr": "auto"}
    return TopKEF(**given | settings)


def taking() -> TopKEF:
    """A compressor that takes over the optimizer's momentum."""
    return auto(momentum="optimizer")


OPTIMIZERS = pytest.mark.parametrize("optimizer", [heavy_ball, training.adamw])
DENSE = hvd.Compression.none
SAID = "starts at zero instead of from its buffers"


def trained(optimizer: Any, compression: Any, steps: int = 4) -> Any:
    """The states of a model and its optimizer; the learning rate was moved."""
    setup = Setup(optimizer=optimizer)
    task = setup.task()
    distributed = setup.distributed(task, compression)
    for step in range(steps):
        training.ordinary(task, distributed, step)
    distributed.param_groups[0]["lr"] *= 0.5
    return copy.deepcopy([task.state_dict(), distributed.state_dict()])


def resumed(saved: Any, optimizer: Any, compression: Any, *, by_broadcast: bool) -> Any:
    """A model and its optimizer that go on; on all ranks, or on rank 0, which tells the others."""
    setup = Setup(optimizer=optimizer)
    task = setup.task()
    distributed = setup.distributed(task, compression)
    if hvd.rank() == 0 or not by_broadcast:
        task.load_state_dict(saved[0])
        distributed.load_state_dict(copy.deepcopy(saved[1]))
    if by_broadcast:
        hvd.broadcast_optimizer_state(distributed, root_rank=0)
        hvd.broadcast_parameters(task.state_dict(), root_rank=0)
    return task, distributed


def without_velocity(saved: Any) -> Any:
    """As an optimizer that has trained, and whose momentum was set to zero."""
    saved = copy.deepcopy(saved)
    for own in saved[1]["state"].values():
        for key in {"momentum_buffer", "exp_avg"} & set(own):
            own[key].zero_()
    return saved


@OPTIMIZERS
@pytest.mark.parametrize("by_broadcast", [False, True])
def test_a_dense_checkpoint_goes_on_without_its_velocity_and_that_is_said(
    optimizer: Any, by_broadcast: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """With all elements sent it is dense training whose momentum was set to zero."""
    saved = trained(optimizer, DENSE)
    settings = TopKEF(ratio=1.0, momentum="optimizer")
    task, ours = resumed(saved, optimizer, settings, by_broadcast=by_broadcast)
    other, dense = resumed(without_velocity(saved), optimizer, DENSE, by_broadcast=False)
    assert ours.param_groups[0]["lr"] == dense.param_groups[0]["lr"]
    for step in range(4, 8):
        training.ordinary(task, ours, step)
        training.ordinary(other, dense, step)
    if optimizer is heavy_ball:  # Adam's mean square is of velocities
        for one, two in zip(task.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    # Horovod broadcasts into the tensors that Adam has by then, and SGD has none.
    has_loaded = hvd.rank() == 0 or not by_broadcast or optimizer is training.adamw
    assert caplog.text.count(SAID) == has_loaded
    assert [SAID in each for each in TopKEF.of(ours).stats().warnings] == [True] * has_loaded
    assert_ranks_equal(task)


def assert_ranks_equal(task: Any) -> None:
    flat = torch.cat([p.detach().reshape(-1) for p in task.parameters()])
    for other in hvd.allgather(flat[None], name="equal"):
        assert torch.equal(flat, other)


@OPTIMIZERS
@pytest.mark.parametrize("by_broadcast", [False, True])
def test_a_compressed_checkpoint_goes_on_without_compression(
    optimizer: Any, by_broadcast: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It has the tensors of a dense one, zeros for what the optimizer did without."""
    saved, dense = trained(optimizer, taking()), trained(optimizer, DENSE)
    assert saved[1]["param_groups"] == dense[1]["param_groups"]
    assert {k: set(v) for k, v in saved[1]["state"].items()} == {
        k: set(v) for k, v in dense[1]["state"].items()
    }
    for own in saved[1]["state"].values():
        assert not any(own[key].any() for key in {"momentum_buffer", "exp_avg"} & set(own))
        assert all(math.isfinite(float(each.sum())) for each in own.values())
    task, plain = resumed(saved, optimizer, DENSE, by_broadcast=by_broadcast)
    training.ordinary(task, plain, 4)
    assert_ranks_equal(task)
    again, ours = resumed(saved, optimizer, taking(), by_broadcast=by_broadcast)
    training.ordinary(again, ours, 4)
    assert_ranks_equal(again)
    assert not TopKEF.of(ours).stats().warnings
    assert SAID not in caplog.text


@OPTIMIZERS
def test_what_is_loaded_after_some_steps_is_dropped_and_saved_as_it_came(
    optimizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    saved = trained(optimizer, DENSE)
    setup = Setup(optimizer=optimizer)
    task = setup.task()
    ours = setup.distributed(task, taking())
    training.ordinary(task, ours, 0)
    ours.load_state_dict(copy.deepcopy(saved[1]))
    for key, own in ours.state_dict()["state"].items():
        assert_same(list(own.values()), list(saved[1]["state"][key].values()))
    assert SAID not in caplog.text
    training.ordinary(task, ours, 1)
    training.ordinary(task, ours, 2)
    assert caplog.text.count(SAID) == 1
    assert_ranks_equal(task)


@pytest.mark.parametrize("by_broadcast", [False, True])
@OPTIMIZERS
def test_momentum_goes_on_with_and_without_compression(
    optimizer: Any, by_broadcast: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Where steps depend on arrivals, it is the optimizer's own."""
    name = "exp_avg" if optimizer is training.adamw else "momentum_buffer"
    for before, after in ((DENSE, auto()), (auto(), DENSE)):
        saved = trained(optimizer, before)
        task, ours = resumed(saved, optimizer, after, by_broadcast=by_broadcast)
        loaded = ours.state_dict()["state"]
        for key, own in saved[1]["state"].items():
            if hvd.rank() == 0 or not by_broadcast:
                assert torch.equal(loaded[key][name], own[name])
        assert any(own[name].any() for own in loaded.values())
        training.ordinary(task, ours, 4)
        assert_ranks_equal(task)
    assert SAID not in caplog.text


def test_broadcasting_the_state_of_new_optimizers_moves_no_parameter() -> None:
    """But the settings of rank 0 get to all."""
    setup = Setup(optimizer=heavy_ball)
    task = setup.task()
    before = training.snapshot(task)
    ours = setup.distributed(task, taking())
    ours.param_groups[0]["weight_decay"] = 0.1
    ours.param_groups[0]["lr"] = 0.25 if hvd.rank() == 0 else 0.5
    hvd.broadcast_optimizer_state(ours, root_rank=0)
    assert ours.param_groups[0]["lr"] == 0.25
    assert_same(training.snapshot(task), before)
    training.ordinary(task, ours, 0)
    assert_ranks_equal(task)


def test_one_rank_alone_may_have_loaded_another_momentum_before_it_is_distributed() -> None:
    """As of a schedule that moves it; it is broadcast afterwards."""
    momentum = 0.8 if hvd.rank() == 0 else 0.9
    setup = Setup(optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=momentum))
    task = setup.task()
    ours = setup.distributed(task, auto())
    hvd.broadcast_optimizer_state(ours, root_rank=0)
    training.ordinary(task, ours, 0)
    assert ours.param_groups[0]["momentum"] == 0.8
    assert_ranks_equal(task)
