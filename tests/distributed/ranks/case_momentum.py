"""Momentum correction between real ranks: instead of SGD's momentum, and never besides it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import training
from horovod_topk.errors import ConfigError
from plain import PlainTopKEF as TopKEF
from resuming import assert_resumes
from training import Setup, Task
from witness import assert_same
from world import TopKEF as DefaultTopKEF
from world import hvd

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
    assert "Pass momentum='auto'" in caplog.text


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
    """The same training as naming it twice, and parameter groups stay as they are."""
    own = {"momentum": 0.0} if optimizer is heavy_ball else {"betas": (0.0, 0.999)}

    def without(parameters: Any) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = optimizer(parameters)
        made.param_groups[0].update(own)
        return made

    named, taken = Setup(optimizer=without).task(), Setup(optimizer=optimizer).task()
    by_name = Setup(optimizer=without).distributed(named, corrected())
    by_itself = Setup(optimizer=optimizer).distributed(taken, corrected(momentum="optimizer"))
    before = {key: by_itself.param_groups[0][key] for key in (*own, "lr")}
    for step in range(4):
        training.ordinary(named, by_name, step)
        training.ordinary(taken, by_itself, step)
        assert {key: by_itself.param_groups[0][key] for key in before} == before
        for velocity, gradient in zip(named.parameters(), taken.parameters(), strict=True):
            assert velocity.grad is not None and gradient.grad is not None
            torch.testing.assert_close(gradient.grad, 0.1 * velocity.grad)
    for one, other in zip(training.snapshot(named), training.snapshot(taken), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert TopKEF.of(by_itself).stats().momentum == 0.9


def test_a_momentum_that_cannot_be_taken_over_is_refused() -> None:
    def dampened(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.1)

    for optimizer in (adagrad, dampened):
        with pytest.raises(ConfigError, match="momentum='optimizer' was given, and"):
            Setup(optimizer=optimizer).distributed(Setup().task(), TopKEF(momentum="optimizer"))


@pytest.mark.parametrize(
    ("optimizer", "kept", "early", "rule"),
    [
        (heavy_ball, "auto", ((60, 0.2),), "sgd"),
        (training.adamw, 0.0, ((60, 0.2),), "adam"),
        (adagrad, "auto", (), None),
    ],
)
def test_the_default_depends_on_the_kind_of_optimizer(
    optimizer: Any, kept: object, early: object, rule: str | None
) -> None:
    setup = Setup(optimizer=optimizer)
    for compression in (DefaultTopKEF, DefaultTopKEF(), DefaultTopKEF.compact()):
        config = TopKEF.of(setup.distributed(setup.task(), compression))._compressor.plan.config
        assert (config.values, config.ratio, config.follow_lr) == ("int4", 0.02, True)
        assert config.momentum == 0.0
        assert (config.velocity_kept, config.stretches) == (kept, early)
        assert config.by_arrivals == rule


def test_what_was_explicit_means_what_it_meant() -> None:
    """Masking beside a momentum that is asked for by name; dense where all are sent."""
    setup = Setup(optimizer=heavy_ball)
    explicit = DefaultTopKEF(momentum="optimizer", values="float32")
    config = TopKEF.of(setup.distributed(setup.task(), explicit))._compressor.plan.config
    assert (config.velocity_kept, config.values) == (0.0, "float32")
    config = TopKEF.of(
        Setup(optimizer=training.adamw).distributed(setup.task(), explicit)
    )._compressor.plan.config
    assert (config.momentum, config.follows_arrivals) == (0.9, False)
    optimizer = setup.distributed(setup.task(), DefaultTopKEF(ratio=1.0))
    assert TopKEF.of(optimizer).stats().momentum == 0.0


def of_an_older_version(saved: Any) -> Any:
    """The state of an optimizer whose momentum was taken over by setting it to 0."""
    (group,) = saved["param_groups"]
    off = {"betas": (0.0, 0.999)} if "betas" in group else {"momentum": 0.0}
    return saved | {"param_groups": [group | off | {"topkef_momentum": (0.9, 0.0)}]}


def test_a_checkpoint_of_an_older_version_brings_along_what_was_taken_over() -> None:
    setup = Setup(optimizer=heavy_ball)
    saved = of_an_older_version(
        setup.distributed(Setup().task(), TopKEF(momentum="optimizer")).state_dict()
    )

    def loaded(parameters: Any) -> torch.optim.Optimizer:
        made = heavy_ball(parameters)
        made.load_state_dict(saved)
        assert made.param_groups[0]["momentum"] == 0.0
        return made

    task = Setup(optimizer=loaded).task()
    again = Setup(optimizer=loaded).distributed(task, TopKEF(momentum="optimizer"))
    assert TopKEF.of(again)._compressor.plan.config.momentum == 0.9
    training.ordinary(task, again, 0)
    assert again.param_groups[0]["momentum"] == 0.9


def test_an_optimizer_without_momentum_has_none_to_take_over() -> None:
    with pytest.raises(ConfigError, match="SGD has none"):
        PLAIN.distributed(PLAIN.task(), TopKEF(momentum="optimizer"))


@pytest.mark.parametrize("optimizer", [heavy_ball, training.adamw])
def test_a_momentum_that_was_taken_over_is_given_back_to_whoever_corrects_none(
    optimizer: Any,
) -> None:
    saved = of_an_older_version(
        Setup(optimizer=optimizer)
        .distributed(Setup().task(), TopKEF(momentum="optimizer"))
        .state_dict()
    )
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
    optimizer = setup.distributed(new, TopKEF(momentum="optimizer", min_numel=0))
    with caplog.at_level("WARNING", "horovod_topk"):
        training.ordinary(new, optimizer, 0)
        assert "starts at zero" not in caplog.text
        optimizer.load_state_dict(saved)
        training.ordinary(new, optimizer, 1)
    assert "momentum of SGD over, and starts at zero" in caplog.text


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
    task = setup.task()
    distributed = setup.distributed(task, compression)
    for step in range(3):
        distributed.zero_grad()
        task.loss(hvd.rank(), step).backward()
        distributed.synchronize()
        change(task)
        with distributed.skip_synchronize():
            distributed.step()
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
    task = PLAIN.task()
    optimizer = PLAIN.distributed(task, corrected())

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
        trained(heavy_ball, corrected(momentum="optimizer", clip_norm=1.0)),
        trained(heavy_ball, corrected(momentum="optimizer"), clip_norm),
        trained(training.adamw, corrected(momentum="optimizer"), clip_norm),
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
    task = PLAIN.task()
    optimizer = PLAIN.distributed(task, corrected())
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
    task = embedded.task()
    optimizer = embedded.distributed(task, corrected())
    for step in range(3):
        training.ordinary(task, optimizer, step)
    assert "times larger" not in caplog.text
    assert not TopKEF.of(optimizer).stats().warnings


def zero_in_place(task: Task) -> None:
    for p in task.parameters():
        assert p.grad is not None
        p.grad.zero_()
