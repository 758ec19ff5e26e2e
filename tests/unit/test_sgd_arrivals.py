"""Compares SGD's steps on compressed gradients with their formulas."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from horovod_topk.core.arrivals import FACTORS, NORMS, RATE, ArrivedToSgd
from horovod_topk.core.norms import TINY, Norms
from horovod_topk.core.plan import TensorSpec, make_plan
from horovod_topk.core.residual import Arenas
from horovod_topk.core.rounds import state_plan
from horovod_topk.errors import ConfigError
from horovod_topk.kernels import native
from horovod_topk.methods.topk import TopK
from horovod_topk.ops.torch import TorchOps
from horovod_topk.ops.torch_buffers import (
    Buffer,
    Numbers,
    _prepare_by_torch,
    _restore_by_torch,
    prepare,
    restore,
)
from horovod_topk.torch_training.sgd import SgdSteps

LR, MOMENTUM, DECAY, LOSS = 0.05, 0.9, 0.1, 0.25


class Exchanged:
    """Stands for a compressor whose last step had these arrivals."""

    def __init__(self, numel: int) -> None:
        self.phi, self.loss, self.is_over = torch.zeros(numel), LOSS, False
        self.steps: Any = None
        self.step = SimpleNamespace(flagged=(), arrivals_to_sgd=self.arrivals)

    def arrivals(self) -> dict[str, ArrivedToSgd[Tensor]]:
        known = ArrivedToSgd(self.phi, self.loss)
        return {} if self.is_over else {"p": known}

    def take(self, gradient: Tensor) -> None:
        self.phi = self.phi * (1 - RATE) + RATE * gradient.view(-1).ne(0)


def prepared(parameter: Tensor, **settings: Any) -> tuple[Any, Exchanged]:
    """An SGD of one parameter whose steps are prepared."""
    own = {"lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY} | settings
    optimizer, exchanged = torch.optim.SGD([parameter], **own), Exchanged(parameter.numel())
    steps: Any = SgdSteps({parameter: "p"}, lambda: exchanged)  # type: ignore[arg-type, return-value]
    exchanged.steps = steps
    optimizer.register_step_pre_hook(lambda it, *_: steps.prepare(it))
    optimizer.register_step_post_hook(lambda *_: steps.restore())
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
        whole = waiting + (1 - LOSS * phi) * g
        moved, waiting = (1 - b) * whole / (1 - MOMENTUM), b * whole
        p = p - LR * (g + MOMENTUM * moved if nesterov else moved)
        torch.testing.assert_close(parameter.view(-1).double(), p, rtol=1e-4, atol=1e-5)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (LR, MOMENTUM, DECAY)


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_gradient_moves_its_weight_as_far_as_with_dense_sgd(nesterov: bool) -> None:
    """It moves its weight by lr / (1 - momentum) in all, whenever it arrives."""
    parameter = nn.Parameter(torch.zeros(3))
    optimizer, exchanged = prepared(parameter, nesterov=nesterov, weight_decay=0.0)
    exchanged.loss = 0.0
    arrive = torch.tensor([[1.0, 0, 0], [1, 0, 0], [1, 0, 0], [1, 0, 0], [1, 1, 0], [1, 0, 1]])
    for step in range(400):
        gradient = arrive[step] if step < len(arrive) else torch.zeros(3)
        exchanged.take(gradient)
        parameter.grad = gradient.clone()
        optimizer.step()
    expected = -LR / (1 - MOMENTUM) * arrive.sum(0)
    torch.testing.assert_close(parameter.detach(), expected, rtol=1e-4, atol=1e-5)


def test_a_rare_gradient_moves_its_weight_at_once() -> None:
    """The first step is about half of the whole move; with dense SGD it is a tenth."""
    parameter = nn.Parameter(torch.zeros(40))
    optimizer, exchanged = prepared(parameter, weight_decay=0.0)
    exchanged.loss = 0.0
    for step in range(60):
        gradient = torch.ones(40) if step in (0, 59) else torch.zeros(40)
        before = parameter.detach().clone()
        exchanged.take(gradient)
        parameter.grad = gradient.clone()
        optimizer.step()
    moved = (before - parameter.detach()) / (LR / (1 - MOMENTUM))
    assert 0.45 < float(moved.min()) <= float(moved.max()) < 0.6


@pytest.mark.parametrize("more", [{}, {"maximize": True}, {"nesterov": True, "weight_decay": 0.0}])
def test_a_step_that_raises_before_its_update_leaves_the_momentum_as_it_was(
    more: dict[str, Any],
) -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(8, 5))
    optimizer, exchanged = prepared(parameter, **more)

    def fail(*_: Any) -> None:
        raise InterruptedError

    def exchange() -> None:
        gradient = sparse()
        exchanged.take(gradient)
        parameter.grad = gradient.view(8, 5)

    for _ in range(5):
        exchange()
        optimizer.step()
    before = optimizer.state[parameter]["momentum_buffer"].clone()
    weights = parameter.detach().clone()
    last = optimizer.register_step_pre_hook(fail)
    exchange()
    with pytest.raises(InterruptedError):
        optimizer.step()
    last.remove()
    assert float((optimizer.state[parameter]["momentum_buffer"] - before).norm()) > 0.1
    exchanged.steps.undo()
    torch.testing.assert_close(
        optimizer.state[parameter]["momentum_buffer"], before, rtol=1e-4, atol=1e-5
    )
    assert torch.equal(parameter, weights)


def test_a_step_that_raises_after_its_update_has_the_momentum_of_the_next() -> None:
    torch.manual_seed(0)
    found = []
    for raises in (False, True):
        parameter = nn.Parameter(torch.zeros(40))
        optimizer, exchanged = prepared(parameter)
        gradient = torch.arange(40.0) % 3
        exchanged.take(gradient)
        parameter.grad = gradient
        if raises:
            failing = patch.object(SgdSteps, "restore", side_effect=InterruptedError)
            with failing, pytest.raises(InterruptedError):
                optimizer.step()
            exchanged.steps.undo()
        else:
            optimizer.step()
        found.append(optimizer.state[parameter]["momentum_buffer"])
    assert torch.equal(*found)


def test_the_momentum_of_a_dense_run_is_kept() -> None:
    """Between steps buffers are those of SGD without compression."""
    parameter = nn.Parameter(torch.zeros(40))
    optimizer, exchanged = prepared(parameter, weight_decay=0.0)
    waiting = torch.randn(40)
    optimizer.state[parameter]["momentum_buffer"] = waiting.clone()
    exchanged.loss = 0.0
    for step in range(300):
        gradient = torch.zeros(40) if step else torch.ones(40)
        exchanged.take(gradient)
        parameter.grad = gradient
        optimizer.step()
        if not step:  # as fast as dense SGD
            own = torch.where(gradient != 0, MOMENTUM * waiting + gradient, MOMENTUM * waiting)
            torch.testing.assert_close(parameter.detach(), -LR * own, rtol=1e-4, atol=1e-5)
    total = -LR / (1 - MOMENTUM) * (MOMENTUM * waiting + 1.0)
    torch.testing.assert_close(parameter.detach(), total, rtol=1e-4, atol=1e-5)


def test_what_waits_is_applied_once_after_compression_has_ended() -> None:
    parameter = nn.Parameter(torch.zeros(40))
    optimizer, exchanged = prepared(parameter, weight_decay=0.0)
    exchanged.loss = 0.0
    total = torch.zeros(40)
    for _ in range(8):
        gradient = sparse()
        total += gradient
        exchanged.take(gradient)
        parameter.grad = gradient.clone()
        optimizer.step()
    exchanged.is_over = True
    for _ in range(300):
        parameter.grad = torch.zeros(40)
        optimizer.step()
    torch.testing.assert_close(
        parameter.detach(), -LR / (1 - MOMENTUM) * total, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("decay", [DECAY, 0.0])
def test_the_kernels_prepare_and_restore_buffers_to_the_same_bits(
    dtype: torch.dtype, decay: float
) -> None:
    assert native.find().library is not None
    gradient, phi = sparse(9999).to(dtype), torch.rand(9999).to(dtype)
    parameter, start = torch.randn(9999).to(dtype), torch.randn(9999).to(dtype)
    one, other = (Buffer(start.clone(), gradient, parameter, phi, LOSS) for _ in range(2))
    numbers = Numbers(MOMENTUM, decay)
    tolerance = 0.0 if dtype == torch.float32 else 1e-12  # torch's roots are nearly rounded
    prepare([one], numbers)
    _prepare_by_torch([other], numbers)
    torch.testing.assert_close(one.buffer, other.buffer, rtol=tolerance, atol=tolerance)
    assert not torch.equal(one.buffer, start)
    prepared = one.buffer.clone()
    restore([(one.buffer, phi)], MOMENTUM)
    _restore_by_torch([(other.buffer, phi)], MOMENTUM)
    torch.testing.assert_close(one.buffer, other.buffer, rtol=tolerance, atol=tolerance)
    assert not torch.equal(one.buffer, prepared)


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


@pytest.mark.parametrize(("momentum", "dampening"), [(1.0, 0.0), (0.9, 0.5)])
def test_an_invalid_momentum_is_an_error_before_anything_changes(
    momentum: float, dampening: float
) -> None:
    parameter = nn.Parameter(torch.ones(4))
    optimizer, exchanged = prepared(parameter)
    optimizer.param_groups[0].update(momentum=momentum, dampening=dampening)
    exchanged.take(torch.ones(4))
    parameter.grad = torch.ones(4)
    with pytest.raises(ConfigError, match=f"has momentum={momentum:g} and dampening={dampening:g}"):
        optimizer.step()
    assert not optimizer.state and torch.equal(parameter.grad, torch.ones(4))


def test_after_dense_steps_what_has_still_to_move_does_not_move_at_once() -> None:
    """Phi is 1 after dense steps, such as those that a guard tries."""
    parameter = nn.Parameter(torch.zeros(40))
    optimizer, exchanged = prepared(parameter, weight_decay=0.0)
    exchanged.loss = 0.0
    for step in range(20):
        exchanged.is_over = 5 < step < 12
        gradient = torch.ones(40) if step == 11 else torch.zeros(40)
        exchanged.take(gradient if step != 11 else torch.zeros(40))
        parameter.grad, before = gradient, parameter.detach().clone()
        optimizer.step()
        if step == 12:
            moved = parameter.detach() - before
            assert float(moved.abs().max()) < 1.5 * MOMENTUM * LR  # dense: MOMENTUM * LR
    expected = torch.full((40,), -LR / (1 - MOMENTUM))
    assert torch.all(parameter.detach() < 0.5 * expected)


def test_a_fused_step_has_buffers_of_parameters_that_are_not_compressed() -> None:
    parameter, other = (nn.Parameter(torch.ones(4)) for _ in range(2))
    optimizer = torch.optim.SGD([parameter, other], lr=LR, momentum=MOMENTUM, fused=True)
    exchanged = Exchanged(4)
    steps: Any = SgdSteps({parameter: "p"}, lambda: exchanged)  # type: ignore[arg-type, return-value]
    exchanged.steps = steps
    optimizer.register_step_pre_hook(lambda it, *_: steps.prepare(it))
    exchanged.take(torch.ones(4))
    parameter.grad, other.grad = torch.ones(4), torch.ones(4)
    optimizer.step()
    torch.testing.assert_close(other.detach(), torch.full((4,), 1 - LR))


@pytest.mark.parametrize("nesterov", [False, True])
def test_keras_and_torch_take_the_same_steps(nesterov: bool) -> None:
    """They begin with the same buffer, and a gradient is zero for many steps."""
    tf = pytest.importorskip("tensorflow")
    keras: Any = pytest.importorskip("keras")
    arrivals = pytest.importorskip("horovod_topk.tensorflow.arrivals")
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.zeros(99))
    twin, exchanged = prepared(parameter, nesterov=nesterov, weight_decay=0.0)
    twin.state[parameter]["momentum_buffer"] = torch.randn(99)
    variable = keras.Variable(np.zeros(99, "f4"))
    optimizer = keras.optimizers.SGD(LR, momentum=MOMENTUM, nesterov=nesterov)
    optimizer.build([variable])
    optimizer.momentums[0].assign(-LR * twin.state[parameter]["momentum_buffer"].numpy())
    for step in range(60):
        gradient = sparse(99) * (step < 4 or step > 50)
        exchanged.take(gradient)
        parameter.grad = gradient.clone()
        twin.step()
        phi = tf.Variable((exchanged.phi if step else gradient.ne(0) * RATE).numpy())
        known = ArrivedToSgd(phi, LOSS, tf.constant(float(step == 0)))
        given = tf.constant(gradient.numpy())
        own = partial(optimizer.update_step, given, variable, LR)
        arrivals._update_sgd(optimizer, given, variable, known, own, lambda: LR)
        found = keras.ops.convert_to_numpy(variable)
        np.testing.assert_allclose(found, parameter.detach().numpy(), rtol=1e-3, atol=1e-5)


def norms_of(numels: list[int]) -> tuple[dict[str, Arenas[Tensor]], Norms[Tensor]]:
    """SGD's states for tensors of these sizes, and what follows their norms."""
    specs = [TensorSpec(f"t{i}", (numel,), "float32") for i, numel in enumerate(numels)]
    (bucket,) = make_plan(specs, TopK(by_arrivals="sgd"), "average").buckets
    states = {}
    for name in (NORMS, FACTORS):
        own = state_plan(bucket, name)
        states[name] = Arenas(own, torch.zeros(own.numel), torch.zeros(own.numel))
    return states, Norms(bucket, states, TorchOps())


def test_a_spike_is_scaled_down_to_one_and_a_half_mean_norms() -> None:
    states, norms = norms_of([4000, 100])
    for scale, factor in ((1.0, 1.0), (1.0, 1.0), (10.0, 0.15), (0.0, 1.0), (1e30, TINY)):
        before = states[NORMS].residual.clone()
        exchanged = [torch.full((4000,), scale), torch.ones(100)]
        norms.limit(exchanged, 1.0)
        norms.swap()
        assert exchanged[0].tolist() == pytest.approx([factor * scale] * 4000, rel=1e-5)
        assert torch.equal(exchanged[1], torch.ones(100))
        found, after = states[FACTORS].residual, states[NORMS].residual
        assert found.tolist() == pytest.approx([factor, 1.0], rel=1e-5, abs=0.0)
        if scale in (0.0, 1e30):
            assert torch.equal(after[0], before[0])
    assert float(after[0]) == pytest.approx(4000**0.5 * (1 + 9 / 20), rel=1e-5)


def test_a_tensor_with_a_gradient_in_every_fifth_step_keeps_all_of_it() -> None:
    states, norms = norms_of([4000])
    for step in range(40):
        norms.limit([torch.full((4000,), float(step % 5 == 0))], 1.0)
        norms.swap()
        assert float(states[FACTORS].residual) == 1.0


LAID_OUT = (torch.contiguous_format, torch.channels_last)


@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
@pytest.mark.parametrize("memory_format", LAID_OUT)
def test_lists_of_buffers_are_prepared_as_each_alone(
    kind: torch.dtype, memory_format: torch.memory_format
) -> None:
    """A list of buffers of several shapes, strides and losses gives what each alone gives."""
    shapes = [(8, 3, 3, 3), (16, 4, 1, 1), (2, 0, 1, 1), (1, 1, 1, 1), (70, 50, 3, 3)]
    drawn = [[torch.randn(shape).to(kind) for _ in range(3)] for shape in shapes]
    ordered = [[t.contiguous(memory_format=memory_format) for t in each] for each in drawn]
    phis = [torch.rand(each[0].numel()) for each in drawn]
    losses = [LOSS, 0.0, LOSS, LOSS, 0.0]
    many = [Buffer(*each, *own) for each, *own in zip(ordered, phis, losses, strict=True)]
    alone = [
        Buffer(b.clone(), *each, *own) for (b, *each), *own in zip(drawn, phis, losses, strict=True)
    ]
    with patch.object(native, "find", lambda: SimpleNamespace(library=None)):
        prepare(many, Numbers(MOMENTUM, DECAY))
        restore([(each.buffer, each.arrivals) for each in many], MOMENTUM)
    for each in alone:
        if each.buffer.numel():
            _prepare_by_torch([each], Numbers(MOMENTUM, DECAY))
            _restore_by_torch([(each.buffer, each.arrivals)], MOMENTUM)
    for one, other in zip(many, alone, strict=True):
        assert torch.equal(one.buffer, other.buffer)
        assert one.buffer.is_contiguous(memory_format=memory_format)
