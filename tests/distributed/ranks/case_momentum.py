"""Momentum correction between real ranks: instead of SGD's momentum, and never besides it."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import horovod.torch as hvd
import pytest
import torch

import training
from horovod_topk.errors import ConfigError
from horovod_topk.torch import TopKEF
from resuming import assert_resumes
from training import Setup
from witness import assert_same

PLAIN = Setup(optimizer=training.plain_sgd)


def corrected(**settings: Any) -> TopKEF:
    return TopKEF(**{"ratio": 0.1, "min_numel": 0, "momentum": 0.9, **settings})


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
def test_at_ratio_one_it_is_the_momentum_of_sgd(exchange: str) -> None:
    dense = training.trajectory(Setup(optimizer=heavy_ball), hvd.Compression.none, steps=12)
    ours = training.trajectory(PLAIN, corrected(ratio=1.0, exchange=exchange), steps=12)
    for one, other in zip(ours, dense, strict=True):
        for mine, theirs in zip(one, other, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def heavy_ball(parameters: Any) -> torch.optim.Optimizer:
    (group,) = training.plain_sgd(parameters).param_groups
    return torch.optim.SGD(group["params"], lr=group["lr"], momentum=0.9)


def normalising(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, betas=(0.0, 0.99))


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.01)


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("settings", [{}, {"values": "int8", "exchange": "sharded"}], ids=str)
def test_ranks_end_equal_and_resume_as_if_they_had_not_stopped(
    settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("momentum")
    assert_resumes(PLAIN, partial(corrected, **settings), folder)


def test_a_momentum_of_the_optimizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="applied twice"):
        Setup(optimizer=heavy_ball).distributed(Setup().task(), corrected())
    with pytest.raises(ConfigError, match=r"betas=\(0.9, 0.999\): it would be applied twice"):
        Setup(optimizer=training.adamw).distributed(Setup().task(), corrected())
    with pytest.raises(ConfigError, match="Adagrad has no momentum"):
        Setup(optimizer=adagrad).distributed(Setup().task(), corrected())
    with pytest.raises(ConfigError, match="AdamW has no such form"):
        Setup(optimizer=normalising).distributed(Setup().task(), corrected(nesterov=True))


def test_adamw_normalises_the_velocity_at_ratio_one() -> None:
    """As if it had been given the sum 0.9^i g that SGD's momentum is."""
    task, plain = Setup(optimizer=normalising).task(), Setup(optimizer=normalising).task()
    optimizer = Setup(optimizer=normalising).distributed(task, corrected(ratio=1.0))
    by_hand = normalising(list(plain.parameters()))
    velocities = [torch.zeros_like(p) for p in plain.parameters()]
    for step in range(4):
        training.ordinary(task, optimizer, step)
        plain.zero_grad()
        plain.loss(hvd.rank(), step).backward()
        for index, (p, velocity) in enumerate(zip(plain.parameters(), velocities, strict=True)):
            assert p.grad is not None
            velocity.mul_(0.9).add_(hvd.allreduce(p.grad, name=f"by_hand.{index}"))
            p.grad = velocity.clone()
        by_hand.step()
    for ours, theirs in zip(task.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_adam_as_it_is_draws_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "horovod_topk"):
        Setup(optimizer=training.adamw).distributed(Setup().task(), TopKEF())
    assert "with TopKEF(momentum='optimizer') it hardly does" in caplog.text


def test_a_momentum_that_comes_later_is_refused() -> None:
    task = PLAIN.task()
    optimizer = PLAIN.distributed(task, corrected())
    optimizer.param_groups[0]["momentum"] = 0.5
    before = training.snapshot(task)
    task.loss(hvd.rank(), 0).backward()
    optimizer.synchronize()
    with optimizer.skip_synchronize(), pytest.raises(ConfigError, match="applied twice"):
        optimizer.step()
    assert_same(training.snapshot(task), before)
    TopKEF.of(optimizer).reset()


@pytest.mark.parametrize("optimizer", [heavy_ball, training.adamw])
def test_the_optimizers_momentum_is_taken_over(optimizer: Any) -> None:
    """The same as naming it twice; also once it has loaded what it was before."""
    own = {"momentum": 0.0} if optimizer is heavy_ball else {"betas": (0.0, 0.999)}

    def without(parameters: Any) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = optimizer(parameters)
        made.param_groups[0].update(own)
        return made

    named, taken = Setup(optimizer=without).task(), Setup(optimizer=optimizer).task()
    spare = Setup(optimizer=optimizer).task()  # the hooks of its optimizer outlive it
    before = Setup(optimizer=optimizer).distributed(spare, hvd.Compression.none).state_dict()
    by_name = Setup(optimizer=without).distributed(named, corrected())
    by_itself = Setup(optimizer=optimizer).distributed(taken, corrected(momentum="optimizer"))
    for step in range(4):
        if step == 2:
            groups = by_itself.state_dict()["param_groups"], before["param_groups"]
            assert groups[0] != groups[1]
            by_itself.param_groups[0].update({key: groups[1][0][key] for key in own})
        training.ordinary(named, by_name, step)
        training.ordinary(taken, by_itself, step)
    assert_same(training.snapshot(named), training.snapshot(taken))
    assert all(by_itself.param_groups[0][key] == value for key, value in own.items())
    assert TopKEF.of(by_itself).stats().momentum == 0.9


def test_a_momentum_that_cannot_be_taken_over_is_refused() -> None:
    def dampened(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.1)

    for optimizer in (adagrad, dampened):
        with pytest.raises(ConfigError, match="momentum='optimizer' was given, and"):
            Setup(optimizer=optimizer).distributed(Setup().task(), TopKEF.compact())


def test_compact_is_int4_with_momentum_correction() -> None:
    compression = TopKEF.compact(min_numel=0)
    optimizer = Setup(optimizer=heavy_ball).distributed(Setup().task(), compression)
    config = TopKEF.of(optimizer)._compressor.plan.config
    assert (config.values, config.ratio, config.momentum) == ("int4", 0.024, 0.9)
    assert optimizer.param_groups[0]["momentum"] == 0.0


def test_a_checkpoint_brings_along_what_was_taken_over() -> None:
    first = Setup(optimizer=heavy_ball).distributed(Setup().task(), TopKEF.compact())
    saved = first.state_dict()

    def loaded(parameters: Any) -> torch.optim.Optimizer:
        made = heavy_ball(parameters)
        made.load_state_dict(saved)
        assert made.param_groups[0]["momentum"] == 0.0
        return made

    again = Setup(optimizer=loaded).distributed(Setup().task(), TopKEF.compact())
    assert TopKEF.of(again)._compressor.plan.config.momentum == 0.9


def test_an_optimizer_without_momentum_has_none_to_take_over() -> None:
    with pytest.raises(ConfigError, match="SGD has none"):
        PLAIN.distributed(PLAIN.task(), TopKEF.compact())


@pytest.mark.parametrize("optimizer", [heavy_ball, training.adamw])
def test_a_momentum_that_was_taken_over_is_given_back_to_whoever_corrects_none(
    optimizer: Any,
) -> None:
    saved = Setup(optimizer=optimizer).distributed(Setup().task(), TopKEF.compact()).state_dict()
    again = Setup(optimizer=optimizer)
    task = again.task()
    plain = again.distributed(task, TopKEF(ratio=0.1, min_numel=0))
    kept = dict(plain.param_groups[0])
    plain.load_state_dict(saved)
    training.ordinary(task, plain, 0)
    setting = "momentum" if optimizer is heavy_ball else "betas"
    assert plain.param_groups[0][setting] == kept[setting]


def test_momentum_that_has_built_up_goes_no_further_and_that_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    setup = Setup(optimizer=heavy_ball)
    task = setup.task()
    dense = heavy_ball(task.parameters())
    task.loss(0, 0).backward()
    dense.step()
    saved, new = dense.state_dict(), setup.task()
    optimizer = setup.distributed(new, TopKEF.compact(min_numel=0))
    with caplog.at_level("WARNING", "horovod_topk"):
        training.ordinary(new, optimizer, 0)
        assert "starts at zero" not in caplog.text
        optimizer.load_state_dict(saved)
        training.ordinary(new, optimizer, 1)
    assert "momentum of SGD over, and starts at zero" in caplog.text
