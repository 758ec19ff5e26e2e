"""Small models, and ways to train them, for comparing one compression with another.

Data depends on (rank, step) and nothing else, so that any rank can work out what another one saw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import world
from horovod_topk.torch_training.gradients import local
from world import hvd

Parameters = list[nn.Parameter]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def noise(rank: int, step: int, shape: Iterable[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers that depend on (rank, step) alone."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(*shape, generator=generator).to(dtype)


class Task(nn.Module):
    """A model with its data: `loss(rank, step)`."""

    def loss(self, rank: int, step: int) -> Tensor:
        raise NotImplementedError

    def forward(self, rank: int, step: int) -> Tensor:
        """What DistributedDataParallel calls when `loss` goes through it."""
        return type(self).loss(self, rank, step)


class Regression(Task):
    """Fits noise with a given network."""

    def __init__(
        self, net: nn.Module, shape: tuple[int, ...] = (8, 20), dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.net, self.shape, self.dtype = net.to(dtype), shape, dtype

    def loss(self, rank: int, step: int) -> Tensor:
        output = self.net(noise(rank, step, self.shape, self.dtype))
        target = noise(rank, step + 500, output.shape, self.dtype)
        return (output - target).square().mean()


def perceptron(dtype: torch.dtype = torch.float32) -> Task:
    """Six parameters of 10 to 660 elements."""
    layers = nn.Linear(20, 33), nn.LayerNorm(33), nn.Tanh(), nn.Linear(33, 10)
    return Regression(nn.Sequential(*layers), dtype=dtype)


class Branches(Task):
    """Eight branches, run forwards in an order of each rank's own, so hooks fire in another."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(12, 5) for _ in range(8))

    def loss(self, rank: int, step: int) -> Tensor:
        order = list(self.branches)
        order = order[3 * rank :] + order[: 3 * rank] if step % 2 else order[:: 1 - 2 * (rank % 2)]
        x = noise(rank, step, (4, 12))
        return sum((branch(x) - 0.1).square().mean() for branch in order)


class Optional(Task):
    """Branches that take part on some ranks, on all, or on none."""

    ddp_options: Mapping[str, Any] = {"find_unused_parameters": True}

    def __init__(self, *, absent_everywhere: bool = False) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(12, 5), nn.Linear(12, 5)
        self.never = nn.Linear(12, 5)
        self.absent_everywhere = absent_everywhere

    def loss(self, rank: int, step: int) -> Tensor:
        x = noise(rank, step, (4, 12))
        loss = (self.always(x) - 1).square().mean()
        if not self.absent_everywhere and step % (rank + 2) == 0:
            loss = loss + (self.sometimes(x) - 1).square().mean()
        return loss


class Embedded(Task):
    """An embedding with sparse gradients before a dense layer, from some step on."""

    def __init__(self, first: int = 0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 6, sparse=True)
        self.head = nn.Linear(6, 3)
        self.first = first

    def loss(self, rank: int, step: int) -> Tensor:
        if step < self.first:
            return (self.head(noise(rank, step, (5, 6))) - 1).square().mean()
        tokens = (noise(rank, step, (5, 7)).abs() * 10).long().clamp(max=39)
        return (self.head(self.embedding(tokens)) - 1).square().mean()


class Tiny(Task):
    """Tensors of 0 and 1 elements and of no dimension, beside an ordinary one."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0))
        self.empty = nn.Parameter(torch.zeros(3, 0))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.single = nn.Parameter(torch.tensor([0.25]))
        self.linear = nn.Linear(20, 3)

    def loss(self, rank: int, step: int) -> Tensor:
        y = self.linear(noise(rank, step, (4, 20))) * self.scalar + self.single
        return (y - 1).square().mean() + self.nothing.sum() + self.empty.square().sum()


class Tied(Task):
    """One weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)
        self.second.weight = self.first.weight

    def loss(self, rank: int, step: int) -> Tensor:
        return (self.second(torch.tanh(self.first(noise(rank, step, (4, 12))))) - 1).square().mean()


class Transposed(Task):
    """A parameter that is a transposed view: its gradient is not contiguous either."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 12).t() * 0.3)
        self.bias = nn.Parameter(torch.zeros(7))

    def loss(self, rank: int, step: int) -> Tensor:
        return (noise(rank, step, (4, 12)) @ self.weight + self.bias - 1).square().mean()


class MixedDtypes(Task):
    """float32 and float64 parameters in one optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(20, 9), nn.Linear(9, 4).double()

    def loss(self, rank: int, step: int) -> Tensor:
        hidden = torch.tanh(self.narrow(noise(rank, step, (8, 20))))
        return (self.wide(hidden.double()) - 1).square().mean()


def convolution() -> Task:
    """A convolution whose weight and gradient are in channels_last order."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    return Regression(net.to(memory_format=torch.channels_last), (2, 3, 6, 6))


# How to take a step. `backward` may run a pass or several.


def ordinary(task: Task, optimizer: Any, step: int) -> None:
    """The usual loop."""
    optimizer.zero_grad()
    task.loss(hvd.rank(), step).backward()
    optimizer.step()


def train(task: Task, optimizer: Any, steps: Iterable[int]) -> None:
    """Usual steps."""
    for step in steps:
        ordinary(task, optimizer, step)


def exchange(task: Task, optimizer: Any, step: int) -> None:
    """A step up to and with `synchronize()`."""
    optimizer.zero_grad()
    task.loss(hvd.rank(), step).backward()
    optimizer.synchronize()


def take(optimizer: Any) -> None:
    """The rest of that step."""
    with optimizer.skip_synchronize():
        optimizer.step()


def thrown_away(task: Any, optimizer: Any, step: int) -> None:
    """A step whose gradients are exchanged and not applied."""
    exchange(task, optimizer, step)
    optimizer.zero_grad()


def with_model_zero_grad(set_to_none: bool) -> Callable[[Task, Any, int], None]:
    """As `ordinary`, clearing gradients through the model."""

    def take(task: Task, optimizer: Any, step: int) -> None:
        task.zero_grad(set_to_none=set_to_none)
        task.loss(hvd.rank(), step).backward()
        optimizer.step()

    return take


def without_clearing(task: Task, optimizer: Any, step: int) -> None:
    """Gradients pile up on the exchanged ones of the step before: legal, if odd."""
    task.loss(hvd.rank(), step).backward()
    optimizer.step()


def clipped(task: Task, optimizer: Any, step: int) -> None:
    """Clip what was exchanged, then step without exchanging again."""
    exchange(task, optimizer, step)
    nn.utils.clip_grad_norm_(task.parameters(), 0.05)
    take(optimizer)


def accumulated(passes: int) -> Callable[[Task, Any, int], None]:
    """Several backward passes before a step."""

    def take(task: Task, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        for i in range(passes):
            task.loss(hvd.rank(), passes * step + i).backward()
        optimizer.step()

    return take


def changing_passes(task: Task, optimizer: Any, step: int) -> None:
    """One backward pass a step at first, two later."""
    if step == 3:
        optimizer.set_backward_passes_per_step(2)
    accumulated(1 if step < 3 else 2)(task, optimizer, step)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3)


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


@dataclass(frozen=True)
class Setup:
    """All about a training run but the compression."""

    build: Callable[[], Task] = perceptron
    optimizer: MakeOptimizer = sgd
    options: Mapping[str, Any] = field(default_factory=dict)  # of DistributedOptimizer or DDP
    groups: Callable[[Any], Any] | None = None  # task -> groups=
    parameter_groups: Callable[[Any], Any] = lambda task: task.parameters()
    named: bool = True
    take_step: Callable[[Task, Any, int], None] = ordinary

    def task(self) -> Task:
        """The model, equal on all ranks."""
        torch.manual_seed(7)
        return hvd.sharded(self.build()) if world.FSDP else self.build()

    def start(self, compression: object) -> tuple[Task, Any]:
        """The model and its optimizer."""
        task = self.task()
        return task, self.distributed(task, compression)

    def distributed(self, task: Task, compression: object) -> Any:
        """The model's optimizer as Horovod wraps it, or DistributedDataParallel the model."""
        options = dict(self.options)
        if self.groups is not None:
            options["groups"] = self.groups(task)
        if world.CONTROLLER == "torchrun":
            optimizer = self.optimizer(self.parameter_groups(task))
            return hvd.distributed(task, optimizer, compression, **options)
        if self.named:
            options["named_parameters"] = task.named_parameters()
        optimizer = self.optimizer(self.parameter_groups(task))
        return hvd.DistributedOptimizer(optimizer, compression=compression, **options)


def snapshot(task: nn.Module) -> list[Tensor]:
    """Copies of all parameters, or of this rank's parts."""
    return [local(p).detach().clone() for p in task.parameters()]


def trajectory(setup: Setup, compression: object, steps: int = 25) -> list[list[Tensor]]:
    """The parameters after every step."""
    task = setup.task()
    optimizer = setup.distributed(task, compression)
    history = []
    for step in range(steps):
        setup.take_step(task, optimizer, step)
        history.append(snapshot(task))
    return history


def by_hand(setup: Setup, steps: int = 25) -> list[list[Tensor]]:
    """As `trajectory`, dense, averaging float32 copies where Horovod's optimizer cannot."""
    task = setup.task()
    optimizer = setup.optimizer(setup.parameter_groups(task))
    history = []
    for step in range(steps):
        optimizer.zero_grad()
        task.loss(hvd.rank(), step).backward()
        for i, p in enumerate(task.parameters()):
            assert p.grad is not None
            mean = hvd.allreduce(p.grad.float().contiguous(), name=f"by_hand.{i}")
            p.grad = torch.empty_like(p.grad).copy_(mean)
        optimizer.step()
        history.append(snapshot(task))
    return history
