"""Nothing is lost, whatever the optimizer: given gradients and residuals are all gradients.

The loss is linear, so that gradients do not depend on weights. After some steps

    sum of the gradients that the optimizer was given + mean of the ranks' residuals
        =  sum of the ranks' mean gradients

A step that counts as skipped, and has applied its gradients, breaks this law: they are sent again.

With pytorch_optimizer installed, 24 optimizers of that package are tried too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plain import PlainTopKEF as TopKEF
from training import Setup, Task, noise
from witness import assert_ranks_equal, residuals
from world import CONTROLLER, hvd

pytestmark = pytest.mark.everywhere(one_in=6)

STEPS = 6
SPARSE = {"ratio": 0.1, "min_numel": 0}
Make = Callable[[Any], Any]


class Linear(Task):
    """A loss whose gradients are noise."""

    def __init__(self, *, matrices: bool = False) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.ones(n, 12)) for n in (30, 20))
        if not matrices:
            self.bias = nn.Parameter(torch.ones(40))

    def loss(self, rank: int, step: int) -> Tensor:
        terms = [(p * self.gradient(i, rank, step)).sum() for i, p in enumerate(self.parameters())]
        return torch.stack(terms).sum()

    def gradient(self, index: int, rank: int, step: int) -> Tensor:
        """Gradient of a parameter by its index, on any rank."""
        return noise(rank, 10 * step + index, list(self.parameters())[index].shape)


class Clears(torch.optim.SGD):
    """Clears gradients within its step, as HeavyBall does."""

    def step(self, closure: Any = None) -> Any:
        super().step()
        self.zero_grad()


class Replaces(torch.optim.SGD):
    """Replaces each gradient by its sign before it applies them."""

    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            p.grad = p.grad.sign()
        super().step()


class Both(torch.optim.Optimizer):
    """Two optimizers as one."""

    def __init__(self, *inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__([group for each in inner for group in each.param_groups], {})

    def step(self, closure: Any = None) -> None:
        for each in self.inner:
            each.step()


def muon_beside_adamw(parameters: Any) -> Both:
    found = list(parameters)
    matrices, others = ([p for p in found if (p.ndim == 2) == two] for two in (True, False))
    return Both(torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01))


def of_torch(name: str, **settings: Any) -> Make:
    return lambda parameters: getattr(torch.optim, name)(parameters, **settings)


TORCH: dict[str, Make] = {
    name: of_torch(name)
    for name in (
        *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon"),
        *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
    )
}
TORCH |= {
    "SGD, Nesterov, foreach": of_torch("SGD", lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "SGD, fused": of_torch("SGD", lr=0.1, momentum=0.9, fused=True),
    "SGD, dampened": of_torch("SGD", lr=0.1, momentum=0.9, dampening=0.5),
    "Adam, fused": of_torch("Adam", fused=True),
    "AdamW, fused": of_torch("AdamW", fused=True, amsgrad=True),
    "Adam, tensor": of_torch("Adam", lr=torch.tensor(0.01), foreach=False),
    "Adagrad, fused": of_torch("Adagrad", fused=True),
    "NAdam, foreach": of_torch("NAdam", foreach=True, decoupled_weight_decay=True),
    "RMSprop, centered": of_torch("RMSprop", centered=True, momentum=0.9),
    "clears": lambda parameters: Clears(parameters, lr=0.1),
    "replaces": lambda parameters: Replaces(parameters, lr=0.1),
}


def given(task: Task, optimizer: Any, step: int) -> list[Tensor]:
    """Take a step; return the gradients that the optimizer was given."""
    optimizer.zero_grad()
    task.loss(hvd.rank(), step).backward()
    optimizer.synchronize()
    found = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in task.parameters()]
    with optimizer.skip_synchronize():
        optimizer.step()
    return found


def given_in_closure(task: Task, optimizer: Any, step: int) -> list[Tensor]:
    """As `given`, with a closure, as LBFGS wants one."""
    found = list[Tensor]()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = task.loss(hvd.rank(), step)
        loss.backward()
        optimizer.synchronize()
        found.extend(p.grad.clone() for p in task.parameters() if p.grad is not None)
        return loss

    with optimizer.skip_synchronize():
        optimizer.step(closure)
    return found


def sam(*, exchanges: bool) -> Any:
    """`given`, after a pass that moves weights for a moment (sharpness-aware minimisation).

    exchanges: whether gradients of the first pass are exchanged as well.
    """

    def take(task: Task, optimizer: Any, step: int) -> list[Tensor]:
        parameters = list(task.parameters())
        if exchanges:
            optimizer.zero_grad()
            task.loss(hvd.rank(), step + 500).backward()
            optimizer.synchronize()
            moves = [p.grad.clone() for p in parameters if p.grad is not None]
        else:
            moves = list(torch.autograd.grad(type(task).loss(task, hvd.rank(), step), parameters))
        before = [p.detach().clone() for p in parameters]
        torch._foreach_add_([p.detach() for p in parameters], moves, alpha=0.01)
        optimizer.zero_grad()
        task.loss(hvd.rank(), step).backward()
        optimizer.synchronize()
        torch._foreach_copy_([p.detach() for p in parameters], before)
        found = [p.grad.clone() for p in parameters if p.grad is not None]
        with optimizer.skip_synchronize():
            optimizer.step()
        return found

    return take


def check(make: Make, take: Any = given, *, matrices: bool = False, discarded: int = 0) -> None:
    """Take steps, and compare what was given and what waits with all gradients.

    discarded: exchanges whose gradients no step applies.
    """
    setup = Setup(build=lambda: Linear(matrices=matrices), optimizer=make)
    task, optimizer = setup.start(TopKEF(**SPARSE))
    total = [torch.zeros_like(p, dtype=torch.float64) for p in task.parameters()]
    before = [p.detach().clone() for p in task.parameters()]
    for step in range(STEPS):
        for sum_, gradient in zip(total, take(task, optimizer, step), strict=True):
            sum_ += gradient
        assert_ranks_equal(task.parameters())
    waiting = residuals(optimizer)
    for i, ((name, p), sum_) in enumerate(zip(task.named_parameters(), total, strict=True)):
        ranks = range(hvd.size())
        due = sum(task.gradient(i, r, step).double() for r in ranks for step in range(STEPS))
        left = hvd.allreduce(waiting[name].double(), name=f"case.{i}").view_as(p)
        torch.testing.assert_close(sum_ + left, due / hvd.size(), rtol=1e-5, atol=1e-5)
        assert bool(left.any())
        assert not torch.equal(p, before[i])
    stats = TopKEF.of(optimizer).stats()
    assert (stats.steps, stats.rolled_back) == (STEPS, discarded)


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("name", TORCH)
def test_optimizers_of_pytorch(name: str) -> None:
    check(TORCH[name], matrices=name == "Muon")


def test_lbfgs_with_a_closure() -> None:
    check(of_torch("LBFGS", max_iter=1), given_in_closure)


@pytest.mark.parametrize("exchanges", [True, False])
def test_two_passes_a_step(exchanges: bool) -> None:
    check(
        of_torch("SGD", lr=0.1, momentum=0.9), sam(exchanges=exchanges), discarded=STEPS * exchanges
    )


@pytest.mark.skipif(CONTROLLER != "torchrun", reason="Horovod takes an optimizer for each part")
def test_two_optimizers_as_one() -> None:
    check(muon_beside_adamw)
