"""Training loops as people have them, with and without steps that are adapted to arrivals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LambdaLR

import training
from horovod_topk.core.run.optimizers import kind_of
from plain import PlainTopKEF as TopKEF
from training import Setup, Task
from witness import assert_same
from world import hvd

STEPS = 12
LR = 0.05


def heavy_ball(parameters: Any, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, **{"lr": LR, "momentum": 0.9, **settings})


def nesterov(parameters: Any) -> torch.optim.Optimizer:
    return heavy_ball(parameters, nesterov=True)


def warmup(optimizer: Any) -> Any:
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))


def run(setup: Setup, schedule: Callable[[Any], Any] | None, compression: Any) -> list[Tensor]:
    """The parameters after training."""
    task, optimizer = setup.start(compression)
    scheduler = None if schedule is None else schedule(optimizer)
    for step in range(STEPS):
        setup.take_step(task, optimizer, step)
        if scheduler is not None:
            scheduler.step()
    return training.snapshot(task)


def dampened(parameters: Any) -> torch.optim.Optimizer:
    return heavy_ball(parameters, dampening=0.1)


class Own(torch.optim.SGD):
    """May use its settings in a way of its own."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


LEFT = {
    "with a step of its own": (
        Setup(optimizer=lambda parameters: Own(parameters, lr=LR, momentum=0.9)),
        "its step() is not that of torch.optim.SGD, Adam or AdamW",
    ),
    "none": (Setup(optimizer=training.plain_sgd), "it has none"),
    "dampened": (Setup(optimizer=dampened), "it is dampened"),
}


@pytest.mark.parametrize("kind", LEFT)
def test_auto_leaves_a_momentum_that_it_cannot_correct(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    setup, why = LEFT[kind]
    task = setup.task()
    with caplog.at_level("INFO", "horovod_topk"):
        optimizer = setup.distributed(task, TopKEF(momentum="auto", follow_lr="auto"))
    assert f"TopKEF leaves momentum to {kind_of(optimizer)}: {why}" in caplog.text
    before = dict(optimizer.param_groups[0])
    training.ordinary(task, optimizer, 0)
    stats = TopKEF.of(optimizer).stats()
    assert stats.momentum == 0.0
    assert [why in warning for warning in stats.warnings] == [True] * (kind != "none")
    assert all(optimizer.param_groups[0][key] == before[key] for key in before if key != "params")


@pytest.mark.horovod
@pytest.mark.parametrize("optimizer", [heavy_ball, training.adamw])
def test_a_rank_without_a_batch_steps_as_one_with_zero_gradients(optimizer: Any) -> None:
    """Whose residual follows the learning rate that the user has set."""

    def skipping(backward: Callable[[Tensor], None]) -> Callable[[Task, Any, int], None]:
        def take(task: Task, optimizer: Any, step: int) -> None:
            optimizer.zero_grad()
            loss = task.loss(hvd.rank(), step)
            if hvd.rank() or step % 3:
                loss.backward()
            else:
                backward(loss)
            optimizer.step()

        return take

    setups = [
        Setup(optimizer=optimizer, take_step=skipping(backward))
        for backward in (lambda _: None, lambda loss: (loss * 0.0).backward())
    ]
    settings = {"ratio": 0.1, "min_numel": 0, "momentum": "auto", "follow_lr": "auto"}
    assert_same(*(run(setup, warmup, TopKEF(**settings)) for setup in setups))


class Wandering(Task):
    """Gradients are noise, whatever the parameters are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(60, 50))

    def loss(self, rank: int, step: int) -> Tensor:
        return (self.weight * training.noise(rank, step, (60, 50))).mean()


@pytest.mark.parametrize("make", [heavy_ball, nesterov, training.adamw])
def test_learning_rates_may_end_at_zero_and_restart(make: Any) -> None:
    """Gradients stay about as large to the end of a cycle, and so does the next step."""
    setup, norms, moved = Setup(Wandering, make), list[float](), list[float]()
    task, optimizer = setup.start(TopKEF(ratio=0.02, momentum="auto", follow_lr="auto"))
    schedule = CosineAnnealingWarmRestarts(optimizer, 40)
    for step in range(70):
        before = training.snapshot(task)
        training.ordinary(task, optimizer, step)
        schedule.step()
        (now,), (old,) = training.snapshot(task), before
        norms.append(float(task.weight.grad.norm()))
        moved.append(float((now - old).norm()))
    assert max(norms[30:50]) < 3 * max(norms[10:30])
    assert max(moved[40:50]) < 4 * max(moved[10:30])


def elsewhere(task: Task, optimizer: Any, step: int) -> None:
    """A step while new tensors are made on another device than the model's."""
    optimizer.zero_grad()
    loss = task.loss(hvd.rank(), step)
    with torch.device("meta"):  # what `torch.set_default_device` does
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("values", ["int4", "int3"])
@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
def test_another_default_device_changes_no_bit(exchange: str, values: str) -> None:
    """CPU kernels write to raw addresses, so their tensors have to be in host memory."""
    settings = {"ratio": 0.1, "min_numel": 0, "momentum": "auto", "exchange": exchange}
    plain, ours = (
        run(Setup(optimizer=heavy_ball, take_step=take), None, TopKEF(values=values, **settings))
        for take in (training.ordinary, elsewhere)
    )
    assert_same(ours, plain)


def test_frozen_parameters_may_have_a_ratio() -> None:
    setup = Setup(optimizer=training.plain_sgd)
    task = setup.task()
    dict(task.named_parameters())["net.0.weight"].requires_grad_(False)
    compression = TopKEF(ratio={"net.0.*": 0.5, "*": 0.05}, min_numel=0)
    optimizer = setup.distributed(task, compression)
    training.ordinary(task, optimizer, 0)
    assert TopKEF.of(optimizer).stats().ratios == {"net.0.bias": 0.5}
