"""Steps of SGD depend on how often elements arrive, on every rank alike."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import training
import world
from case_arrivals import Valley, auto, by_closure, clipped
from horovod_topk.core.arrivals import LOSS
from horovod_topk.guard import Guard
from plain import PlainTopKEF as TopKEF
from resuming import assert_resumes
from training import Setup
from witness import assert_ranks_equal, assert_same
from world import hvd

LR, DECAY, MOMENTUM, STEPS = 0.02, 0.1, 0.9, 10


def heavy_ball(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM, weight_decay=DECAY)


def nesterov(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM, weight_decay=DECAY, nesterov=True)


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM, weight_decay=DECAY, fused=True)


def falling(task: Any, optimizer: Any, step: int) -> None:
    """The learning rate and the momentum fall, as schedulers let them."""
    for group in optimizer.param_groups:
        group["lr"], group["momentum"] = LR * 0.8**step, MOMENTUM - 0.05 * step
    training.ordinary(task, optimizer, step)


class Reference:
    """SGD by the formulas of `horovod_topk.core.arrivals`, in float64."""

    def __init__(self, start: Tensor, *, nesterov: bool) -> None:
        self.p, self.nesterov = start.detach().double().clone(), nesterov
        self.unit = self.largest = 0.0  # learning rates
        self.phi, self.buffer = torch.zeros_like(self.p), torch.zeros_like(self.p)

    def step(self, gradient: Tensor, group: dict[str, Any]) -> None:
        """gradient: the one that the optimizer applied; group: its settings in the step."""
        lr, m = group["lr"], group["momentum"]
        self.phi = 0.9 * self.phi + 0.1 * (gradient != 0)
        self.unit, self.largest = max(lr, 0.95 * self.unit), max(self.largest, lr)
        g = gradient.double() + DECAY * self.p
        b = m * self.phi**0.25
        c = 1 - LOSS * self.phi * (self.unit / self.largest) ** 2
        whole = m * self.buffer + c * g
        moved, self.buffer = (1 - b) / (1 - m) * whole, b * whole / m
        self.p -= lr * (g + m * moved if self.nesterov else moved)


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize(
    ("make", "take", "exchange"),
    [
        (heavy_ball, training.ordinary, "allgather"),
        (nesterov, falling, "sharded"),
        (heavy_ball, clipped, "sharded"),
        (fused, by_closure, "allgather"),
    ],
    ids=["SGD", "Nesterov", "clipped", "closure"],
)
def test_steps_are_those_of_the_formula(make: Any, take: Any, exchange: str) -> None:
    setup = Setup(build=Valley, optimizer=make)
    task: Any = setup.task()
    optimizer = setup.distributed(task, auto(exchange=exchange, follow_lr="auto"))
    reference = Reference(task.weight, nesterov=make is nesterov)
    applied = list[Tensor]()
    optimizer.register_step_post_hook(lambda *_: applied.append(task.weight.grad.clone()))
    for step in range(STEPS):
        take(task, optimizer, step)
        state = TopKEF.of(optimizer).state_dict()
        (phi,), (factor,) = (
            state[f"state.{key}"]["residuals"].values() for key in ("arrivals", "factors")
        )
        reference.step(applied[-1], optimizer.param_groups[0])
        torch.testing.assert_close(phi.view(40, 30).double(), reference.phi, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(task.weight.double(), reference.p, rtol=1e-4, atol=1e-5)
        buffer = optimizer.state[task.weight]["momentum_buffer"].double()
        torch.testing.assert_close(buffer, reference.buffer, rtol=1e-4, atol=1e-5)
        assert_ranks_equal([task.weight.detach(), phi, factor])
    assert reference.phi.min() < 0.1 < 0.3 < reference.phi.max()


@pytest.mark.world_size(2)
def test_what_is_sent_whole_has_the_optimizers_own_momentum() -> None:
    """After `set_ratio(1.0)` weights move as with dense SGD."""
    setup = Setup(build=Valley, optimizer=heavy_ball)
    task, twin = setup.task(), setup.task()
    optimizer = setup.distributed(task, auto())
    TopKEF.of(optimizer).set_ratio(1.0)
    dense = setup.distributed(twin, auto(ratio=1.0))
    for step in range(40):
        training.ordinary(task, optimizer, step)
        training.ordinary(twin, dense, step)
    for one, other in zip(task.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.world_size(2)
def test_training_goes_on_dense_after_a_fall_back() -> None:
    """The optimizer applies what its buffer holds, with its own momentum."""
    setup = Setup(build=Valley, optimizer=heavy_ball)
    task: Any = setup.task()
    optimizer = setup.distributed(task, auto(guard=Guard(nonfinite=2)))
    for step in range(6):
        training.ordinary(task, optimizer, step)
    buffer, p = optimizer.state[task.weight]["momentum_buffer"], task.weight
    for _ in range(2):
        optimizer.zero_grad()
        (task.loss(hvd.rank(), 0) * torch.nan).backward()
        is_ddp = world.CONTROLLER == "torchrun"
        if not is_ddp:
            optimizer.synchronize()
        p.grad.zero_()
        with contextlib.nullcontext() if is_ddp else optimizer.skip_synchronize():
            optimizer.step()
    before, start = buffer.double().clone(), p.detach().double().clone()
    training.ordinary(task, optimizer, 6)
    assert TopKEF.of(optimizer)._compressor.guard.is_over
    own = MOMENTUM * before + p.grad + DECAY * start
    torch.testing.assert_close(buffer.double(), own, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(p.double(), start - LR * own, rtol=1e-4, atol=1e-5)
    assert_ranks_equal([p.detach(), buffer])


@pytest.mark.world_size(2, 3)
def test_ranks_agree_where_owners_alone_select() -> None:
    """All ranks have the same weights, also a rank that owns no shard of the tensor."""
    setup = Setup(build=Valley, optimizer=heavy_ball)
    task: Any = setup.task()
    settings = {"ratio": 1.0, "gather_ratio": 0.05, "exchange": "sharded"}
    optimizer = setup.distributed(task, auto(**settings))
    for step in range(STEPS):
        training.ordinary(task, optimizer, step)
        assert_ranks_equal([task.weight.detach()])
    (phi,) = TopKEF.of(optimizer).state_dict()["state.arrivals"]["residuals"].values()
    assert phi.min() < 0.1 < 0.15 < phi.max()


def test_a_restarted_run_takes_the_same_steps(tmp_path: Path) -> None:
    """`assert_resumes` restores TopKEF's state alone, so that this SGD has none."""
    setup = Setup(build=Valley, optimizer=lambda parameters: Stateless(parameters, lr=LR))
    assert_resumes(setup, auto, tmp_path, training.ordinary)


class Stateless(torch.optim.SGD):
    """An SGD that begins anew in each step, so that nothing but its gradients matters."""

    def __init__(self, parameters: Any, **settings: Any) -> None:
        super().__init__(parameters, momentum=MOMENTUM, **settings)
        self.register_step_post_hook(lambda it, *_: it.state.clear())


def test_other_settings_leave_the_steps_alone() -> None:
    for make, settings, follows in (
        (heavy_ball, {}, True),
        (nesterov, {}, True),
        (heavy_ball, {"momentum": 0}, False),
        (heavy_ball, {"ratio": 1.0}, False),
        (training.plain_sgd, {}, False),
    ):
        setup = Setup(build=Valley, optimizer=make)
        optimizer = setup.distributed(setup.task(), auto(**settings))
        config = TopKEF.of(optimizer)._compressor.config
        assert config.follows_arrivals is follows, settings
        assert not (follows and config.momentum)


def test_a_group_without_momentum_is_left_alone() -> None:
    def two_groups(parameters: Any) -> torch.optim.Optimizer:
        first, second = parameters
        groups = [{"params": [first], "momentum": 0.0}, {"params": [second]}]
        return torch.optim.SGD(groups, lr=LR, momentum=MOMENTUM)

    from case_arrivals import Valleys

    setup = Setup(build=Valleys, optimizer=two_groups)
    task: Any = setup.task()
    optimizer = setup.distributed(task, auto())
    first: nn.Parameter = task.first.weight
    for step in range(4):
        before = first.detach().clone()
        training.ordinary(task, optimizer, step)
        torch.testing.assert_close(first.detach(), before - LR * first.grad)
    assert "momentum_buffer" not in optimizer.state.get(first, {})


@pytest.mark.horovod
@pytest.mark.parametrize("make", [heavy_ball, nesterov])
def test_an_embedding_may_have_sparse_gradients(make: Any) -> None:
    """Training ends with the same weights as with dense gradients."""

    def dense() -> Any:
        task = training.Embedded()
        task.embedding.sparse = False
        return task

    found = list[list[Tensor]]()
    for build in (training.Embedded, dense):
        setup = Setup(build=build, optimizer=make)
        task = setup.task()
        optimizer = setup.distributed(task, auto())
        for step in range(STEPS):
            training.ordinary(task, optimizer, step)
        found.append(training.snapshot(task))
    assert_same(*found)
