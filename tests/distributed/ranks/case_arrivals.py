"""Steps of Adam and AdamW depend on how often elements arrive, on every rank alike."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import training
import world
from plain import PlainTopKEF as TopKEF
from resuming import assert_resumes
from training import Setup, Task
from witness import assert_ranks_equal
from world import hvd

LR, DECAY, STEPS, BETAS = 0.01, 0.1, 8, (0.5, 0.99)  # for 4 steps far is 1


class Valley(Task):
    """A loss whose gradients swing from side to side."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(40, 30) * 0.1)

    def loss(self, rank: int, step: int) -> Tensor:
        noise = 0.1 * training.noise(rank, step, (40, 30))
        return (self.weight - noise + 0.2 * (-1.0) ** step).square().sum()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, weight_decay=DECAY, betas=BETAS)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=LR, weight_decay=DECAY, betas=BETAS, amsgrad=False)


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, weight_decay=DECAY, betas=BETAS, fused=True)


def heavy_ball(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR, momentum=0.9, weight_decay=DECAY)


def moments(optimizer: Any) -> list[Tensor]:
    """Copies of an optimizer's momenta, as a checkpoint has them."""
    keys = ("exp_avg", "momentum_buffer")
    states = optimizer.state_dict()["state"].values()
    return [state[key].clone() for state in states for key in keys if key in state]


def auto(**settings: Any) -> TopKEF:
    return TopKEF(**{"ratio": 0.2, "min_numel": 0, "momentum": "auto"} | settings)


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


def clipped(task: Task, optimizer: Any, step: int) -> None:
    """Gradients are clipped after the exchange."""
    optimizer.zero_grad()
    task.loss(hvd.rank(), step).backward()
    is_ddp = world.CONTROLLER == "torchrun"
    if not is_ddp:
        optimizer.synchronize()
    nn.utils.clip_grad_norm_(task.parameters(), 0.5)
    with contextlib.nullcontext() if is_ddp else optimizer.skip_synchronize():
        optimizer.step()


class Reference:
    """Adam by the formulas of `horovod_topk.core.arrivals`, in float64."""

    def __init__(self, start: Tensor, *, decoupled: bool) -> None:
        self.p, self.decoupled, self.steps = start.detach().double().clone(), decoupled, 0
        self.m, self.v, self.phi = (torch.zeros_like(self.p) for _ in range(3))

    def step(self, gradient: Tensor, factors: Tensor) -> None:
        """gradient: the one that the optimizer applied."""
        often = self.phi > 0.5
        self.phi = 0.9 * self.phi + 0.1 * (gradient != 0)
        g, rms = gradient.double(), float(self.p.square().mean().sqrt())
        if self.decoupled:
            self.p *= 1 - LR * DECAY
        else:
            g = g + DECAY * self.p
        self.steps += 1
        b = BETAS[0] * self.phi**0.5 * (self.steps > 1)
        c = torch.where(often, *factors.double()) if self.steps > 1 else 1.0
        self.m = b * self.m + (1 - b) * c * g
        self.v = BETAS[1] * self.v + (1 - BETAS[1]) * g**2
        root = (self.v / (1 - BETAS[1] ** self.steps)).sqrt()
        far = max(1.0, 0.2 * rms / LR) if self.steps > 4 else 1.0
        self.m = self.m.clamp(-far * root, far * root) if self.steps > 1 else self.m
        self.p = self.p - LR * self.m / (root + 1e-8)


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize(
    ("make", "take", "exchange"),
    [
        (adamw, training.ordinary, "allgather"),
        (adam, training.ordinary, "allgather"),
        (adamw, clipped, "sharded"),
        (fused, by_closure, "allgather"),
    ],
    ids=["AdamW", "Adam", "clipped", "closure"],
)
def test_steps_are_those_of_the_formula(make: Any, take: Any, exchange: str) -> None:
    setup = Setup(build=Valley, optimizer=make)
    task: Any = setup.task()
    optimizer = setup.distributed(task, auto(exchange=exchange))
    reference = Reference(task.weight, decoupled=make is not adam)
    applied = list[Tensor]()
    optimizer.register_step_post_hook(lambda *_: applied.append(task.weight.grad.clone()))
    least = 1.0
    for step in range(STEPS):
        take(task, optimizer, step)
        state = TopKEF.of(optimizer).state_dict()
        (factors,) = state["state.factors"]["residuals"].values()
        (phi,) = state["state.arrivals"]["residuals"].values()
        reference.step(applied[-1], factors)
        torch.testing.assert_close(phi.view(40, 30).double(), reference.phi, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(task.weight.double(), reference.p, rtol=1e-4, atol=1e-5)
        assert_ranks_equal([task.weight.detach(), factors, phi])
        least = min(least, TopKEF.of(optimizer).stats().step_factor)
    assert 0.0999 < least < 0.95
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"], group["betas"]) == (LR, DECAY, BETAS)


@pytest.mark.world_size(2)
def test_ranks_send_what_moves_adams_weights_most() -> None:
    """Weights are about v^(-1/4); a v far below its mean counts as a larger one."""
    setup = Setup(build=Slopes, optimizer=adamw)
    task: Any = setup.task()
    optimizer = setup.distributed(task, auto())
    by_magnitude = list[bool]()
    for step in range(STEPS):
        residuals = TopKEF.of(optimizer).state_dict()["residuals"]
        waiting = residuals["weight"].view(40, 30).clone() if residuals else torch.zeros(40, 30)
        v = optimizer.state[task.weight].get("exp_avg_sq", torch.ones(40, 30)).clone()
        (gradient,) = torch.autograd.grad(task.loss(hvd.rank(), step), [task.weight])
        training.ordinary(task, optimizer, step)
        left = TopKEF.of(optimizer).state_dict()["residuals"]["weight"].view(40, 30)
        sent, magnitude = left == 0, (waiting + gradient).abs()
        least = 2.0 ** (v.mean().log2().floor() - 7)
        keys = magnitude * v.clamp(min=least) ** -0.25
        assert sent.sum() == 240
        assert keys[sent].min() > keys[~sent].max() / 1.25
        by_magnitude.append(bool(magnitude[sent].min() >= magnitude[~sent].max()))
    assert by_magnitude[0] and not any(by_magnitude[1:])


class Slopes(Valley):
    """A valley that is much steeper in some directions."""

    def loss(self, rank: int, step: int) -> Tensor:
        noise = 0.1 * training.noise(rank, step, (40, 30))
        steep = torch.logspace(-1, 1, 30)
        return (steep * (self.weight - noise)).square().sum()


class Valleys(Task):
    """Two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Valley(), Valley()

    def loss(self, rank: int, step: int) -> Tensor:
        return self.first.loss(rank, step) + self.second.loss(rank, step)


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    first, second = parameters
    groups = [{"params": [first], "betas": (0.9, 0.5)}, {"params": [second]}]
    return torch.optim.AdamW(groups, lr=LR, betas=BETAS)


def test_energies_fade_as_fast_as_the_mean_square() -> None:
    """Each parameter group has its own second beta, which may change."""
    setup = Setup(build=Valleys, optimizer=two_groups)
    task: Any = setup.task()
    optimizer = setup.distributed(task, auto())
    applied, expected = list[list[Tensor]](), torch.zeros(2)
    optimizer.register_step_post_hook(
        lambda *_: applied.append([p.grad.clone() for p in task.parameters()])
    )
    for step in range(6):
        if step == 3:
            optimizer.param_groups[1]["betas"] = (0.9, 0.1)
        training.ordinary(task, optimizer, step)
        found = TopKEF.of(optimizer).state_dict()["state.energy"]["residuals"]
        betas = torch.tensor([group["betas"][1] for group in optimizer.param_groups])
        expected = betas * expected + torch.stack([g.square().sum() for g in applied[-1]])
        energies = torch.stack([found[f"{name}.weight"].sum() for name in ("first", "second")])
        torch.testing.assert_close(energies, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("kept", [True, False], ids=["saved", "not saved"])
def test_the_optimizers_state_is_its_own(kept: bool) -> None:
    """Its first moment is Adam's, so that training can go on without compression."""
    setup = Setup(build=Valley, optimizer=adamw)
    task: Any = setup.task()
    optimizer = setup.distributed(task, auto())
    for step in range(STEPS):
        training.ordinary(task, optimizer, step)
    (own,) = optimizer.state_dict()["state"].values()
    assert own["exp_avg"].abs().max() > 0.0
    plain = adamw([nn.Parameter(task.weight.detach().clone())])
    if kept:
        plain.load_state_dict(optimizer.state_dict())
    (group,) = plain.param_groups
    assert group["betas"] == BETAS


def test_other_settings_leave_the_steps_alone() -> None:
    for make, settings, follows in (
        (adamw, {}, True),
        (adamw, {"momentum": 0}, False),
        (adamw, {"exchange": "allgather", "ratio": 1.0}, False),
    ):
        setup = Setup(build=Valley, optimizer=make)
        optimizer = setup.distributed(setup.task(), auto(**settings))
        config = TopKEF.of(optimizer)._compressor.config
        assert config.follows_arrivals is follows, settings
        assert not (follows and config.momentum)


def test_a_restarted_run_takes_the_same_steps(tmp_path: Path) -> None:
    """`assert_resumes` restores TopKEF's state alone, so that this AdamW has none."""
    setup = Setup(build=Valley, optimizer=lambda parameters: Stateless(parameters, lr=LR))
    assert_resumes(setup, auto, tmp_path, training.ordinary)


class Stateless(torch.optim.AdamW):
    """An AdamW that begins anew in each step, so that nothing but its gradients matters."""

    def __init__(self, parameters: Any, **settings: Any) -> None:
        super().__init__(parameters, **settings)
        self.register_step_post_hook(lambda it, *_: it.state.clear())


@pytest.mark.parametrize("make", [heavy_ball, adamw])
def test_a_step_that_raises_leaves_the_momentum_as_it_was(make: Any) -> None:
    """A checkpoint saved after the error has dense momenta, and training goes on."""
    setup = Setup(build=Valley, optimizer=make)
    task: Any = setup.task()
    optimizer = setup.distributed(task, auto())
    for step in range(4):
        training.ordinary(task, optimizer, step)
    (before,), weight = moments(optimizer), task.weight.detach().clone()
    (state,) = optimizer.state.values()
    key = "exp_avg" if "exp_avg" in state else "momentum_buffer"

    def fail(*_: Any) -> None:
        if not torch.equal(state[key], before):  # TopKEF has prepared it
            raise InterruptedError

    failing = optimizer.register_step_pre_hook(fail)
    with pytest.raises(InterruptedError):
        training.ordinary(task, optimizer, 4)
    failing.remove()
    assert float((state[key] - before).norm()) > 0.01 * float(before.norm())
    (after,) = moments(optimizer)
    is_known = (after != 0) | (before == 0)  # Adam's moments at their limit are not
    assert is_known.float().mean() > 0.9
    torch.testing.assert_close(after[is_known], before[is_known], rtol=1e-3, atol=1e-4)
    assert torch.equal(task.weight, weight)
    for step in range(5, STEPS):
        training.ordinary(task, optimizer, step)
    assert_ranks_equal(training.snapshot(task))
    assert TopKEF.of(optimizer).stats().rolled_back == 1


def test_users_hooks_see_dense_momenta_after_a_step() -> None:
    """Also those that were registered before compression was attached."""
    seen = list[Tensor]()

    def look(optimizer: Any, *_: Any) -> None:
        seen.extend(state["momentum_buffer"].clone() for state in optimizer.state.values())

    def watched(parameters: Any) -> torch.optim.Optimizer:
        optimizer = heavy_ball(parameters)
        optimizer.register_step_post_hook(look)
        return optimizer

    setup = Setup(build=Valley, optimizer=watched)
    task = setup.task()
    optimizer: Any = setup.distributed(task, auto())
    if world.CONTROLLER != "torchrun":  # Horovod makes a new optimizer, without the hooks
        optimizer.register_step_post_hook(look)
    for step in range(3):
        training.ordinary(task, optimizer, step)
        assert torch.equal(seen[-1], *moments(optimizer))
