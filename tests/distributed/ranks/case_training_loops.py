"""Training loops as people have them, while the optimizer's momentum is taken over.

Each is compared with a reference that shares no code with horovod_topk: dense training where
everything is sent, error feedback of velocities by its formulas where it is not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, CyclicLR, LambdaLR, OneCycleLR

import training
from horovod_topk.core.momentum_takeover import kind_of
from horovod_topk.errors import ConfigError, RepeatedSynchronizeError
from plain import PlainTopKEF as TopKEF
from reference import ErrorFeedback
from training import Setup, Task
from witness import assert_same
from world import hvd

STEPS = 12
LR = 0.05


def whole(**settings: Any) -> TopKEF:
    """Sends everything, so that only the momentum is ours."""
    return TopKEF(**{"ratio": 1.0, "momentum": "optimizer", **settings})


def heavy_ball(parameters: Any, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, **{"lr": LR, "momentum": 0.9, **settings})


def nesterov(parameters: Any) -> torch.optim.Optimizer:
    return heavy_ball(parameters, nesterov=True)


def one_cycle(optimizer: Any) -> Any:
    """It moves momentum from 0.95 to 0.85 and back."""
    return OneCycleLR(optimizer, max_lr=LR, total_steps=STEPS)


def cyclic(optimizer: Any) -> Any:
    return CyclicLR(optimizer, base_lr=LR / 10, max_lr=LR, step_size_up=4)


def warmup(optimizer: Any) -> Any:
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))


def in_two_groups(task: Task) -> Any:
    """Of different learning rates and momenta; one has none."""
    first, *others = task.parameters()
    other = {"params": [first], "lr": LR / 2, "momentum": 0.5}
    return [other, {"params": others[:2]}, {"params": others[2:], "momentum": 0.0}]


def scaled(task: Task, optimizer: Any, step: int) -> None:
    """Autocast, and GradScaler's recipe for Horovod."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = task.loss(hvd.rank(), step)
    scaler.scale(loss).backward()
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)


LOOPS = {
    "momentum": (Setup(optimizer=heavy_ball), None),
    "Nesterov": (Setup(optimizer=nesterov), None),
    "OneCycleLR": (Setup(optimizer=heavy_ball), one_cycle),
    "OneCycleLR, Nesterov": (Setup(optimizer=nesterov), one_cycle),
    "CyclicLR": (Setup(optimizer=heavy_ball), cyclic),
    "rates as tensors": (
        Setup(optimizer=lambda parameters: heavy_ball(parameters, lr=torch.tensor(LR))),
        one_cycle,
    ),
    "warm-up": (Setup(optimizer=heavy_ball), warmup),
    "groups": (Setup(optimizer=heavy_ball, parameter_groups=in_two_groups), one_cycle),
    "accumulation": (
        Setup(
            optimizer=heavy_ball,
            options={"backward_passes_per_step": 2},
            take_step=training.accumulated(2),
        ),
        one_cycle,
    ),
    "GradScaler": (Setup(optimizer=heavy_ball, take_step=scaled), one_cycle),
}


def run(setup: Setup, schedule: Callable[[Any], Any] | None, compression: Any) -> list[Tensor]:
    """The parameters after training."""
    task = setup.task()
    optimizer = setup.distributed(task, compression)
    scheduler = None if schedule is None else schedule(optimizer)
    for step in range(STEPS):
        setup.take_step(task, optimizer, step)
        if scheduler is not None:
            scheduler.step()
    return training.snapshot(task)


def param_of(loop: str) -> Any:
    """A loop's name, for Horovod alone where its optimizer is given options."""
    return pytest.param(loop, marks=pytest.mark.horovod if LOOPS[loop][0].options else ())


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("loop", [*map(param_of, LOOPS)])
def test_a_loop_trains_as_dense_does_where_everything_is_sent(loop: str) -> None:
    ours, dense = (run(*LOOPS[loop], each) for each in (whole(), hvd.Compression.none))
    tolerance = 1e-2 if loop == "GradScaler" else 1e-4  # bfloat16 rounds what differs by little
    for one, other in zip(ours, dense, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance / 10)


class Velocities(ErrorFeedback):
    """Error feedback of u = m u + g, of which a share stays where a was sent: units of gradients.

    kept: that share, or "auto".
    """

    def __init__(self, task: Task, make: Any, kept: float | str, **settings: Any) -> None:
        super().__init__(task, make, **settings)
        self.kept, self.factor, self.rates, self.unit = kept, 0.0, [0.0], 0.0
        self.velocities = [
            {name: np.zeros(p.numel(), np.float32) for name, p in task.named_parameters()}
            for _ in range(self.ranks)
        ]

    def _gradients(self, rank: int, batches: Any) -> dict[str, np.ndarray]:
        gradients = super()._gradients(rank, batches)
        return {
            name: self.velocities[rank][name] * np.float32(self.factor) + gradient
            for name, gradient in gradients.items()
        }

    def turn(self, rate: float, momentum: float) -> None:
        """Set the rate and momentum of the next step; with "auto", rescale residuals."""
        self.factor = momentum
        self.rates.append(rate)
        before, self.unit = self.unit, max(rate, 0.95 * self.unit)
        if self.kept == "auto" and before:
            ratio = np.float32(before / self.unit)
            self.residuals = [
                {name: e * ratio for name, e in own.items()} for own in self.residuals
            ]

    def share(self, velocity: np.ndarray, sums: np.ndarray) -> Any:
        """Share of the velocity that stays where an element was sent."""
        if self.kept != "auto":
            return self.kept
        decay = self.unit / max(self.rates)
        return 1 - 0.5 * decay**2 * np.minimum(1, abs(velocity / sums))

    def exchange(self, batches: Any) -> dict[str, np.ndarray]:
        moved = [self._gradients(rank, batches) for rank in range(self.ranks)]
        before = self.residuals
        self.residuals = [dict(each) for each in before]
        applied = super().exchange(batches)
        for rank, each in enumerate(moved):
            for name, velocity in each.items():
                sums = before[rank][name] + velocity
                sent, kept = self.residuals[rank][name] != sums, self.share(velocity, sums)
                self.velocities[rank][name] = np.where(sent, velocity * kept, velocity)
        return {name: each * np.float32(1 - self.factor) for name, each in applied.items()}


@pytest.mark.everywhere
@pytest.mark.world_size(2, 3, 4)
@pytest.mark.parametrize("kept", [0.75, "auto"])
def test_an_update_is_that_of_the_formulas(kept: float | str) -> None:
    """Of a few entries, while OneCycleLR moves momentum, with weight decay, clipped at the end.

    p -= lr / (1 - m) (clip((1 - m) v) + w p)
    """
    decayed = Setup(optimizer=lambda parameters: heavy_ball(parameters, weight_decay=1e-2))
    task, plain = decayed.task(), Setup(optimizer=training.plain_sgd).task()
    settings = {"velocity_kept": kept, "follow_lr": kept == "auto"}
    compression = TopKEF(ratio=0.1, min_numel=0, momentum="optimizer", **settings)
    optimizer = decayed.distributed(task, compression)
    schedule = one_cycle(optimizer)
    by_hand = Velocities(plain, training.plain_sgd, kept, ranks=hvd.size(), ratio=0.1)
    for step in range(STEPS):
        group = optimizer.param_groups[0]
        lr = group["lr"]
        by_hand.turn(lr, group["momentum"])
        applied = by_hand.exchange([step])
        optimizer.zero_grad()
        task.loss(hvd.rank(), step).backward()
        optimizer.synchronize()
        for name, p in task.named_parameters():
            assert p.grad is not None
            expected = torch.from_numpy(applied[name]).view(p.shape)
            torch.testing.assert_close(p.grad, expected, rtol=1e-4, atol=1e-6)
        torch.nn.utils.clip_grad_norm_(task.parameters(), 0.05)
        before = training.snapshot(task)
        with optimizer.skip_synchronize():
            optimizer.step()
        assert (group["lr"], group["momentum"]) == (lr, by_hand.factor)
        for p, old in zip(task.parameters(), before, strict=True):
            assert p.grad is not None
            moved = old - lr / (1 - by_hand.factor) * (p.grad + 1e-2 * old)
            torch.testing.assert_close(p.detach(), moved, rtol=1e-5, atol=1e-6)
        plain.load_state_dict(task.state_dict())
        schedule.step()


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.01)


def dampened(parameters: Any) -> torch.optim.Optimizer:
    return heavy_ball(parameters, dampening=0.1)


def narrow() -> Task:
    return training.perceptron(torch.bfloat16)


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
    "of another kind": (Setup(optimizer=adagrad), "it is none of torch.optim.SGD, Adam or AdamW"),
    "dampened": (Setup(optimizer=dampened), "it is dampened"),
    "narrow": (Setup(narrow, heavy_ball), "gradients are torch.bfloat16"),
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


@pytest.mark.parametrize("optimizer", [heavy_ball, nesterov, training.adamw])
def test_auto_takes_a_momentum_over_that_it_can_correct(optimizer: Any) -> None:
    setup = Setup(optimizer=optimizer)
    same = {"ratio": 0.1, "min_numel": 0, "velocity_kept": 0.75}
    found = [
        run(setup, warmup, TopKEF(**same, momentum=momentum, follow_lr=follows))
        for momentum, follows in (("auto", "auto"), ("optimizer", True))
    ]
    assert_same(*found)


def test_a_momentum_that_is_set_to_zero_stays_there() -> None:
    """In the middle of training; PyTorch's SGD would keep its velocity for later."""
    setup, velocity = Setup(optimizer=heavy_ball), [0.0] * 6
    task = setup.task()
    optimizer = setup.distributed(task, whole())
    for step, m in enumerate([0.9, 0.9, 0.0, 0.0, 0.9]):
        optimizer.param_groups[0]["momentum"] = m
        before = training.snapshot(task)
        task.zero_grad()
        gradients = torch.autograd.grad(task.loss(hvd.rank(), step), list(task.parameters()))
        means = [hvd.allreduce(g, name=f"mean.{i}") for i, g in enumerate(gradients)]
        velocity = [m * u + g for u, g in zip(velocity, means, strict=True)]
        training.ordinary(task, optimizer, step)
        assert optimizer.param_groups[0]["momentum"] == m
        for p, old, u in zip(task.parameters(), before, velocity, strict=True):
            torch.testing.assert_close(p.detach(), old - LR * u, rtol=1e-4, atol=1e-6)


def test_momentum_that_moves_between_exchange_and_step_scales_no_step() -> None:
    """Gradients are 1 - m velocities of the momentum that they were exchanged with."""
    setup = Setup(optimizer=heavy_ball)
    task = setup.task()
    optimizer = setup.distributed(task, whole())
    before = training.snapshot(task)
    task.loss(hvd.rank(), 0).backward()
    optimizer.synchronize()
    gradients = [p.grad.clone() for p in task.parameters() if p.grad is not None]
    optimizer.param_groups[0]["momentum"] = 0.5
    with optimizer.skip_synchronize():
        optimizer.step()
    for p, old, gradient in zip(task.parameters(), before, gradients, strict=True):
        torch.testing.assert_close(p.detach(), old - LR / 0.1 * gradient)
    assert optimizer.param_groups[0]["momentum"] == 0.5


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


def test_a_step_that_fails_is_no_part_of_what_is_saved() -> None:
    """The user has interrupted it, and saves."""
    setup = Setup(optimizer=heavy_ball)
    task = setup.task()
    optimizer = setup.distributed(task, whole(ratio=0.1))
    before = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    task.loss(hvd.rank(), 0).backward()
    optimizer.synchronize()
    optimizer.param_groups[0]["weight_decay"] = "none"
    with optimizer.skip_synchronize(), pytest.raises(TypeError):
        optimizer.step()
    optimizer.param_groups[0]["weight_decay"] = before["weight_decay"]
    (saved,) = optimizer.state_dict()["param_groups"]
    assert {key: saved[key] for key in before} == before
    TopKEF.of(optimizer).reset()
    optimizer.zero_grad()
    training.ordinary(task, optimizer, 1)
    assert all(optimizer.param_groups[0][key] == before[key] for key in before)


@pytest.mark.horovod
def test_a_step_that_is_refused_leaves_parameter_groups_as_they_were() -> None:
    setup = Setup(optimizer=heavy_ball)
    task = setup.task()
    optimizer = setup.distributed(task, whole(ratio=0.1))
    before = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    task.loss(hvd.rank(), 0).backward()
    optimizer.synchronize()
    with (
        pytest.warns(UserWarning, match="skip_synchronize"),
        pytest.raises(RepeatedSynchronizeError),
    ):
        optimizer.step()
    after = optimizer.param_groups[0]
    assert {key: after[key] for key in before} == before
    TopKEF.of(optimizer).reset()


@pytest.mark.horovod
def test_a_sparse_gradient_has_the_momentum_that_was_taken_over() -> None:
    """It is exchanged as a dense one."""
    ours = Setup(training.Embedded, heavy_ball)
    dense = Setup(training.Embedded, heavy_ball, {"sparse_as_dense": True})
    pairs = zip(run(ours, None, whole()), run(dense, None, hvd.Compression.none), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_momentum_that_cannot_be_corrected_any_more_is_an_error_before_anything_is_sent() -> None:
    setup = Setup(optimizer=heavy_ball)
    task = setup.task()
    optimizer = setup.distributed(task, whole(ratio=0.1))
    training.ordinary(task, optimizer, 0)
    state = TopKEF.of(optimizer)
    before = state.stats()
    optimizer.param_groups[0]["momentum"] = 1.0
    optimizer.zero_grad()
    with pytest.raises(ConfigError, match=r"group 0 of \w+ has momentum=1\.0"):
        training.ordinary(task, optimizer, 1)
    assert state.stats().steps == before.steps
    state.reset()
    optimizer.param_groups[0]["momentum"] = 0.9
    training.ordinary(task, optimizer, 1)
    assert state.stats().steps == before.steps + 1


def test_a_closure_that_fails_leaves_parameter_groups_as_they_were() -> None:
    setup = Setup(optimizer=heavy_ball)
    task = setup.task()
    optimizer = setup.distributed(task, whole(ratio=0.1))

    def fail() -> float:
        raise RuntimeError("no loss")

    before = dict(optimizer.param_groups[0])
    with optimizer.skip_synchronize(), pytest.raises(RuntimeError, match="no loss"):
        optimizer.step(fail)
    after = optimizer.param_groups[0]
    assert all(after[key] == before[key] for key in ("lr", "momentum", "nesterov"))


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
    task = setup.task()
    optimizer = setup.distributed(task, TopKEF(ratio=0.02, momentum="auto", follow_lr="auto"))
    schedule = CosineAnnealingWarmRestarts(optimizer, 40)
    for step in range(70):
        before = training.snapshot(task)
        training.ordinary(task, optimizer, step)
        schedule.step()
        (now,), (old,) = training.snapshot(task), before
        norms.append(float(task.weight.grad.norm()))
        moved.append(float((now - old).norm()))
    print(
        "XXX",
        make.__name__,
        max(norms[10:30]),
        max(norms[30:50]),
        max(moved[10:30]),
        max(moved[40:50]),
        max(moved[50:]),
    )
    assert max(norms[30:50]) < 3 * max(norms[10:30])
    assert max(moved[40:50]) < 3 * max(moved[10:30])
