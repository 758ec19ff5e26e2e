"""Momentum correction between real ranks: instead of SGD's momentum, and never besides it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import training
from horovod_topk.errors import ConfigError
from plain import PlainTopKEF as TopKEF
from training import Setup, Task
from witness import assert_ranks_equal, assert_same
from world import TopKEF as DefaultTopKEF
from world import hvd

PLAIN = Setup(optimizer=training.plain_sgd)


def corrected(**settings: Any) -> TopKEF:
    return TopKEF(**{"ratio": 0.1, "min_numel": 0, "momentum": 0.9, **settings})


def heavy_ball(parameters: Any) -> torch.optim.Optimizer:
    (group,) = training.plain_sgd(parameters).param_groups
    return torch.optim.SGD(group["params"], lr=group["lr"], momentum=0.9)


def normalising(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, betas=(0.0, 0.99))


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.01)


def test_a_momentum_of_the_optimizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="applied twice"):
        Setup(optimizer=heavy_ball).distributed(Setup().task(), corrected())
    with pytest.raises(ConfigError, match=r"betas=\(0.9, 0.999\): it would be applied twice"):
        Setup(optimizer=training.adamw).distributed(Setup().task(), corrected())
    with pytest.raises(ConfigError, match="Adagrad has no momentum"):
        Setup(optimizer=adagrad).distributed(Setup().task(), corrected())
    with pytest.raises(ConfigError, match="AdamW has no such form"):
        Setup(optimizer=normalising).distributed(
            Setup().task(), corrected(momentum=(0.9, "nesterov"))
        )


def test_a_momentum_that_comes_later_is_refused() -> None:
    task, optimizer = PLAIN.start(corrected())
    optimizer.param_groups[0]["momentum"] = 0.5
    before = training.snapshot(task)
    task.loss(hvd.rank(), 0).backward()
    optimizer.synchronize()
    with optimizer.skip_synchronize(), pytest.raises(ConfigError, match="applied twice"):
        optimizer.step()
    assert_same(training.snapshot(task), before)
    TopKEF.of(optimizer).reset()


@pytest.mark.parametrize(
    ("optimizer", "early", "rule"),
    [
        (heavy_ball, ((60, 0.2),), "sgd"),
        (training.adamw, ((60, 0.2),), "adam"),
        (adagrad, ((60, 0.2),), "own"),
    ],
)
def test_the_default_depends_on_the_kind_of_optimizer(
    optimizer: Any, early: object, rule: str | None
) -> None:
    setup = Setup(optimizer=optimizer)
    for compression in (DefaultTopKEF, DefaultTopKEF()):
        plan = TopKEF.of(setup.distributed(setup.task(), compression))._compressor.plan
        config, update_rule = plan.config, plan.update_rule and plan.update_rule.name
        assert (config.values, config.ratio, config.follow_lr) == ("int4", 0.02, True)
        assert (config.momentum, config.stretches, update_rule) == (0.0, early, rule)


def auto(**settings: Any) -> TopKEF:
    given = {"ratio": 0.1, "min_numel": 0, "momentum": "auto", "follow_lr": "auto"}
    return TopKEF(**given | settings)


@pytest.mark.horovod
def test_one_rank_alone_may_have_loaded_another_momentum_before_it_is_distributed() -> None:
    """As of a schedule that moves it; it is broadcast afterwards."""
    momentum = 0.8 if hvd.rank() == 0 else 0.9
    setup = Setup(optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=momentum))
    task, ours = setup.start(auto())
    hvd.broadcast_optimizer_state(ours, root_rank=0)
    training.ordinary(task, ours, 0)
    assert ours.param_groups[0]["momentum"] == 0.8
    assert_ranks_equal(task.parameters())


def clip_norm(task: Task) -> None:
    torch.nn.utils.clip_grad_norm_(task.parameters(), 1.0)


def clip_value(task: Task) -> None:
    torch.nn.utils.clip_grad_value_(task.parameters(), 1.0)


def replace(task: Task) -> None:
    for p in task.parameters():
        assert p.grad is not None
        p.grad = p.grad.clamp(-1.0, 1.0)


def leave(task: Task) -> None:
    pass


def trained(optimizer: Any, compression: TopKEF, change: Callable[[Task], None] = leave) -> Any:
    """An optimizer after three steps whose gradients were changed after the exchange."""
    setup = Setup(optimizer=optimizer)
    task, distributed = setup.start(compression)
    for step in range(3):
        training.exchange(task, distributed, step)
        change(task)
        training.take(distributed)
    return distributed


CLIPPED = "threshold 10 times larger"


@pytest.mark.parametrize("change", [clip_norm, clip_value, replace])
def test_clipping_velocities_is_warned_of_once(
    change: Callable[[Task], None], caplog: pytest.LogCaptureFixture
) -> None:
    """They arrive there, up to 10 times larger than gradients, if the optimizer has no momentum."""
    optimizer = trained(training.plain_sgd, corrected(), change)
    assert caplog.text.count(CLIPPED) == 1
    assert "the gradient of" in caplog.text
    assert "TopKEF(clip_norm=...)" in caplog.text
    (warning,) = TopKEF.of(optimizer).stats().warnings
    assert CLIPPED in warning


def test_clipping_in_a_closure_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    task, optimizer = PLAIN.start(corrected())

    def closure() -> Any:
        optimizer.zero_grad()
        loss = task.loss(hvd.rank(), 0)
        loss.backward()
        optimizer.synchronize()
        clip_norm(task)
        return loss

    with optimizer.skip_synchronize():
        optimizer.step(closure)
    assert caplog.text.count(CLIPPED) == 1


def test_clipping_that_does_no_harm_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Without momentum correction, before the exchange, in units of gradients."""
    quiet = [
        trained(heavy_ball, corrected(momentum=0.0), clip_norm),
        trained(training.plain_sgd, corrected(clip_norm=1.0)),
        trained(normalising, corrected(), clip_norm),
        trained(training.adamw, corrected(momentum="auto"), clip_norm),
    ]
    assert "times larger" not in caplog.text
    assert not any(TopKEF.of(optimizer).stats().warnings for optimizer in quiet)


def scaled(*, told: bool, change: Callable[[Task], None] = leave) -> Any:
    """As `trained`, by GradScaler's recipe for Horovod, over steps with an overflow among them."""
    setup, scaler = PLAIN, torch.amp.GradScaler("cpu", init_scale=1024.0)
    task, settings = setup.task(), {"grad_scaler": scaler} if told else {}
    optimizer = setup.distributed(task, corrected(**settings))
    for step in range(4):
        optimizer.zero_grad()
        loss = task.loss(hvd.rank(), step) * (math.inf if step == 1 else 1.0)
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        change(task)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
    return optimizer


@pytest.mark.parametrize("told", [True, False])
def test_unscaling_is_no_clipping(told: bool, caplog: pytest.LogCaptureFixture) -> None:
    quiet = TopKEF.of(scaled(told=told)).stats().warnings
    assert not [each for each in quiet if CLIPPED in each]
    assert "times larger" not in caplog.text
    (warning,) = (
        each
        for each in TopKEF.of(scaled(told=told, change=clip_norm)).stats().warnings
        if CLIPPED in each
    )
    assert warning in caplog.text
    assert caplog.text.count(CLIPPED) == 1


@pytest.mark.horovod
def test_what_users_do_without_clipping_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Plain steps, an exchange that is dropped, gradients cleared in place, sparse ones."""
    task, optimizer = PLAIN.start(corrected())
    for step in range(6):
        task.loss(hvd.rank(), step).backward()
        if step % 2:
            optimizer.synchronize()
            clip_norm(task)  # and never stepped on
            optimizer.zero_grad() if step == 3 else zero_in_place(task)
            if step != 5:  # then nothing clears what was exchanged
                task.loss(hvd.rank(), step).backward()
        optimizer.step()
        optimizer.zero_grad()
    embedded = Setup(training.Embedded, training.plain_sgd, {"sparse_as_dense": True})
    task, optimizer = embedded.start(corrected())
    training.train(task, optimizer, range(3))
    assert "times larger" not in caplog.text
    assert not TopKEF.of(optimizer).stats().warnings


def zero_in_place(task: Task) -> None:
    for p in task.parameters():
        assert p.grad is not None
        p.grad.zero_()
