"""SGD's steps by arrivals, against their formulas."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from horovod_topk.core.arrivals import ARRIVALS, RATE, ArrivedToSgd
from horovod_topk.kernels import native
from horovod_topk.ops.torch_buffers import Buffer, Numbers, _by_torch, prepare
from horovod_topk.torch_training.sgd import SgdSteps

LR, MOMENTUM, DECAY, LOSS, FACTOR = 0.05, 0.9, 0.1, 0.25, 0.75


class Exchanged:
    """Stands for a compressor whose last step had these arrivals."""

    def __init__(self, numel: int) -> None:
        self.phi, self.before = torch.zeros(numel), torch.zeros(numel)
        self.states, self.loss, self.factor = {ARRIVALS: self}, LOSS, FACTOR
        self.pieces = {"p": ()}
        self.plan = SimpleNamespace(config=SimpleNamespace(follows_arrivals=True))
        self.step = SimpleNamespace(flagged=(), arrivals_to_sgd=self.arrivals)

    def residual(self, name: str) -> Tensor:
        return self.phi

    def arrivals(self) -> dict[str, ArrivedToSgd[Tensor]]:
        return {"p": ArrivedToSgd(self.phi, self.before, torch.tensor([self.factor]), self.loss)}

    def take(self, gradient: Tensor) -> None:
        self.before = self.phi
        self.phi = self.phi * (1 - RATE) + RATE * gradient.view(-1).ne(0)


def prepared(parameter: Tensor, **settings: Any) -> tuple[Any, Exchanged]:
    """An SGD of one parameter whose steps are prepared."""
    own = {"lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY} | settings
    optimizer, exchanged = torch.optim.SGD([parameter], **own), Exchanged(parameter.numel())
    steps: Any = SgdSteps({parameter: "p"}, lambda: exchanged)  # type: ignore[arg-type, return-value]
    optimizer.register_step_pre_hook(lambda it, *_: steps.prepare(it))
    return optimizer, exchanged


def sparse(numel: int = 40) -> Tensor:
    return torch.randn(numel) * (torch.rand(numel) < 0.3)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("more", [{}, {"maximize": True}, {"foreach": False}, {"fused": True}])
def test_steps_are_those_of_the_formula(nesterov: bool, more: dict[str, Any]) -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(8, 5))
    optimizer, exchanged = prepared(parameter, nesterov=nesterov, **more)
    p, waiting = parameter.detach().double().view(-1), torch.zeros(40).double()
    for _ in range(12):
        gradient = sparse()
        exchanged.take(gradient)
        parameter.grad = gradient.view(8, 5).clone()
        optimizer.step()
        phi = exchanged.phi.double()
        g = gradient.double() * (-1 if "maximize" in more else 1) + DECAY * p
        b = MOMENTUM * phi**0.25
        whole = waiting + FACTOR * (1 - LOSS * phi) * g
        moved, waiting = (1 - b) * whole / (1 - MOMENTUM), b * whole
        p = p - LR * (g + MOMENTUM * moved if nesterov else moved)
        torch.testing.assert_close(parameter.view(-1).double(), p, rtol=1e-4, atol=1e-5)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (LR, MOMENTUM, DECAY)


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_gradient_moves_its_weight_as_far_as_with_dense_sgd(nesterov: bool) -> None:
    """Whenever it arrives: lr / (1 - momentum) in all, but for the loss."""
    parameter = nn.Parameter(torch.zeros(3))
    optimizer, exchanged = prepared(parameter, nesterov=nesterov, weight_decay=0.0)
    exchanged.loss, exchanged.factor = 0.0, 1.0
    arrive = torch.tensor([[1.0, 0, 0], [1, 0, 0], [1, 0, 0], [1, 0, 0], [1, 1, 0], [1, 0, 1]])
    for step in range(400):
        gradient = arrive[step] if step < len(arrive) else torch.zeros(3)
        exchanged.take(gradient)
        parameter.grad = gradient.clone()
        optimizer.step()
    expected = -LR / (1 - MOMENTUM) * arrive.sum(0)
    torch.testing.assert_close(parameter.detach(), expected, rtol=1e-4, atol=1e-5)


def test_a_rare_gradient_moves_its_weight_at_once() -> None:
    """More than half of it, where dense SGD moves a tenth."""
    parameter = nn.Parameter(torch.zeros(40))
    optimizer, exchanged = prepared(parameter, weight_decay=0.0)
    exchanged.loss, exchanged.factor = 0.0, 1.0
    for step in range(60):
        gradient = torch.ones(40) if step in (0, 59) else torch.zeros(40)
        before = parameter.detach().clone()
        exchanged.take(gradient)
        parameter.grad = gradient.clone()
        optimizer.step()
    moved = (before - parameter.detach()) / (LR / (1 - MOMENTUM))
    assert 0.45 < float(moved.min()) <= float(moved.max()) < 0.6


def test_the_momentum_of_a_dense_run_is_kept() -> None:
    """Before anything has arrived, buffers are those of SGD without compression."""
    parameter = nn.Parameter(torch.zeros(40))
    optimizer, exchanged = prepared(parameter, weight_decay=0.0)
    waiting = torch.randn(40)
    optimizer.state[parameter]["momentum_buffer"] = waiting.clone()
    exchanged.loss, exchanged.factor = 0.0, 1.0
    for step in range(300):
        gradient = torch.zeros(40) if step else torch.ones(40)
        exchanged.take(gradient)
        parameter.grad = gradient
        optimizer.step()
    total = -LR / (1 - MOMENTUM) * (MOMENTUM * waiting + 1.0)
    torch.testing.assert_close(parameter.detach(), total, rtol=1e-4, atol=1e-5)


def test_what_waits_is_applied_once_after_compression_has_ended() -> None:
    parameter = nn.Parameter(torch.zeros(40))
    optimizer, exchanged = prepared(parameter, weight_decay=0.0)
    exchanged.loss, exchanged.factor = 0.0, 1.0
    total = torch.zeros(40)
    for _ in range(8):
        gradient = sparse()
        total += gradient
        exchanged.take(gradient)
        parameter.grad = gradient.clone()
        optimizer.step()
    exchanged.plan.config.follows_arrivals = False
    for _ in range(300):
        parameter.grad = torch.zeros(40)
        optimizer.step()
    torch.testing.assert_close(
        parameter.detach(), -LR / (1 - MOMENTUM) * total, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("decay", [DECAY, 0.0])
@pytest.mark.parametrize("dense", [False, True])
def test_the_kernel_prepares_buffers_to_the_same_bits(
    dtype: torch.dtype, decay: float, dense: bool
) -> None:
    assert native.find().library is not None
    gradient, phi = sparse(9999).to(dtype), torch.rand(9999).to(dtype)
    parameter, start = torch.randn(9999).to(dtype), torch.randn(9999).to(dtype)
    before = None if dense else torch.rand(9999).to(dtype)
    one, other = (
        Buffer(start.clone(), gradient, parameter, phi, before, FACTOR, LOSS) for _ in range(2)
    )
    numbers = Numbers(MOMENTUM, decay)
    prepare([one], numbers)
    _by_torch(other, numbers)
    tolerance = 0.0 if dtype == torch.float32 else 1e-12  # torch's roots are nearly rounded
    torch.testing.assert_close(one.buffer, other.buffer, rtol=tolerance, atol=tolerance)
    assert not torch.equal(one.buffer, start)


def test_a_fused_step_that_a_scaler_skips_changes_no_buffer() -> None:
    parameter = nn.Parameter(torch.randn(40))
    optimizer, exchanged = prepared(parameter, fused=True)
    exchanged.take(torch.ones(40))
    parameter.grad = torch.ones(40)
    optimizer.step()
    before = optimizer.state[parameter]["momentum_buffer"].clone()
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(1.0)
    parameter.grad = torch.full((40,), torch.inf)
    optimizer.step()
    assert torch.equal(optimizer.state[parameter]["momentum_buffer"], before)


@pytest.mark.parametrize("fresh", [True, False])
def test_keras_and_torch_prepare_the_same_buffers(fresh: bool) -> None:
    tf = pytest.importorskip("tensorflow")
    keras: Any = pytest.importorskip("keras")
    arrivals = pytest.importorskip("horovod_topk.tensorflow.arrivals")
    gradient, start = sparse(999), torch.randn(999)
    before = None if fresh else torch.rand(999)
    phi = (0.0 if before is None else before * (1 - RATE)) + RATE * gradient.ne(0)
    variable = keras.Variable(np.zeros(999, "f4"))
    optimizer = keras.optimizers.SGD(LR, momentum=MOMENTUM)
    optimizer.build([variable])
    optimizer.momentums[0].assign(-LR * start.numpy())
    known = ArrivedToSgd(*[tf.constant(phi.numpy())] * 2, tf.constant([FACTOR]), LOSS)
    arrivals._prepare_sgd(
        optimizer, tf.constant(gradient.numpy()), variable, known, lambda: optimizer.learning_rate
    )
    own = Buffer(start, gradient, start, phi, before, FACTOR, LOSS)
    prepare([own], Numbers(MOMENTUM, 0.0))
    found = keras.ops.convert_to_numpy(optimizer.momentums[0]) / -LR
    np.testing.assert_allclose(found, own.buffer.numpy(), rtol=1e-3, atol=1e-4)
