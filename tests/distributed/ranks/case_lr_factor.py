"""Adam's and AdamW's learning rate is lowered while steps overshoot, on every rank alike."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import training
import world
from horovod_topk.errors import ConfigError
from plain import PlainTopKEF as TopKEF
from resuming import assert_resumes
from training import Setup, Task
from witness import assert_ranks_equal, assert_same
from world import hvd

LR, DECAY, STEPS = 0.5, 0.1, 12


class Valley(Task):
    """A loss on which Adam with a learning rate of 0.5 swings from side to side."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(40, 30) * 0.1)

    def loss(self, rank: int, step: int) -> Tensor:
        return (self.weight - 0.01 * training.noise(rank, step, (40, 30))).square().sum()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, weight_decay=DECAY)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=LR)


def auto(**settings: Any) -> TopKEF:
    given = {"ratio": 0.5, "min_numel": 0, "momentum": "auto", "lower_lr": True}
    return TopKEF(**given | settings)


class Witness:
    """Records the parameter group that the optimizer's step sees, and the gradients it applies."""

    def __init__(self, optimizer: Any) -> None:
        self.gradients: list[Tensor] = []
        self.group: dict[str, Any] = {}
        optimizer.register_step_pre_hook(self._look)
        optimizer.register_step_post_hook(self._look_back)

    def _look(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        (group,) = optimizer.param_groups
        self.group = dict(group)

    def _look_back(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        (group,) = optimizer.param_groups
        self.gradients = [p.grad.clone() for p in group["params"] if p.grad is not None]


def by_closure(task: Task, optimizer: Any, step: int) -> None:
    """Gradients are computed, and exchanged, within the step."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = task.loss(hvd.rank(), step)
        loss.backward()
        if world.CONTROLLER != "torchrun":
            optimizer.synchronize()
        return loss

    is_ddp = world.CONTROLLER == "torchrun"
    with contextlib.nullcontext() if is_ddp else optimizer.skip_synchronize():
        optimizer.step(closure)


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize(
    ("make", "take"),
    [(adamw, training.ordinary), (adam, training.ordinary), (adamw, by_closure)],
    ids=["AdamW", "Adam", "closure"],
)
def test_steps_are_those_of_the_lower_rate(make: Any, take: Any) -> None:
    setup = Setup(build=Valley, optimizer=make)
    task, other = setup.task(), setup.task()
    optimizer, reference = setup.distributed(task, auto()), make(other.parameters())
    (theirs,) = reference.param_groups
    decay = theirs["weight_decay"]
    witness, factors = Witness(optimizer), list[float]()
    for step in range(STEPS):
        take(task, optimizer, step)
        factor = TopKEF.of(optimizer).stats().lr_factor
        for p, gradient in zip(other.parameters(), witness.gradients, strict=True):
            p.grad = gradient
        theirs |= {"lr": LR * factor, "weight_decay": decay / factor, "betas": (0.0, 0.999)}
        reference.step()
        assert_same(training.snapshot(task), training.snapshot(other))
        (group,) = optimizer.param_groups
        assert (group["lr"], group["weight_decay"], group["betas"]) == (LR, decay, (0.9, 0.999))
        factors.append(factor)
    assert factors[:2] == [1.0, 1.0]
    assert min(factors) < 0.2
    assert_ranks_equal([torch.tensor(factors)])


def test_others_keep_their_rate() -> None:
    setup = Setup(build=Valley, optimizer=adamw)
    task = setup.task()
    optimizer = setup.distributed(task, auto(lower_lr=False))
    witness = Witness(optimizer)
    for step in range(STEPS):
        training.ordinary(task, optimizer, step)
        assert witness.group["lr"] == LR
    assert TopKEF.of(optimizer).stats().lr_factor == 1.0


def test_the_rate_of_sgd_cannot_be_lowered() -> None:
    setup = Setup(build=Valley, optimizer=training.sgd)
    with pytest.raises(ConfigError, match="lower_lr=True was given"):
        setup.distributed(setup.task(), auto())


def test_a_low_rate_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    setup = Setup(build=Valley, optimizer=adamw)
    task = setup.task()
    optimizer = setup.distributed(task, auto())
    for step in range(STEPS):
        training.ordinary(task, optimizer, step)
    assert caplog.text.count("The learning rate is multiplied by") == (hvd.rank() == 0)


def test_a_restarted_run_goes_on_at_the_same_rate(tmp_path: Path) -> None:
    """`assert_resumes` restores TopKEF's state alone, so that this AdamW has none."""
    factors = list[float]()

    def take(task: Task, optimizer: Any, step: int) -> None:
        training.ordinary(task, optimizer, step)
        factors.append(TopKEF.of(optimizer).stats().lr_factor)

    setup = Setup(build=Valley, optimizer=lambda parameters: Stateless(parameters, lr=LR))
    assert_resumes(setup, auto, tmp_path, take)
    assert factors[3::2] == factors[4::2], "of both runs, step by step"
    assert max(factors[3:5]) < 0.5


class Stateless(torch.optim.AdamW):
    """An AdamW that begins anew in each step, so that nothing but its gradients matters."""

    def __init__(self, parameters: Any, **settings: Any) -> None:
        super().__init__(parameters, **settings)
        self.register_step_post_hook(lambda it, *_: it.state.clear())
