"""Updates of SGD, Adam and AdamW on compressed gradients, against their mathematics."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from oracle.updates import Exact
from torch import Tensor, nn

from horovod_topk.errors import ConfigError
from horovod_topk.kernels import native
from horovod_topk.ops import coding
from horovod_topk.ops.coding import ALWAYS, OFTEN
from horovod_topk.torch_training.updates import Updates
from horovod_topk.updates import formulas
from horovod_topk.updates.formulas import AFTER, Adam, Sgd, adam_of
from horovod_topk.updates.torch import Update, update, update_by_torch

LR, MU, DECAY, BETAS = 0.05, 0.9, 0.1, (0.5, 0.99)  # with these betas far is 1 for 4 steps
ISAS = ("portable", "avx2", "avx512")
FOUND = native.find()
FASTEST = ISAS.index(FOUND.description) if FOUND.library else -1


def sparse(*shape: int, kind: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=kind) * (torch.rand(*shape) < 0.3)


# Kernels.


@pytest.fixture(params=[*ISAS[: FASTEST + 1], "PyTorch"])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What computes updates: kernels for each instruction set, and PyTorch's operations."""
    if request.param != "PyTorch":
        monkeypatch.setenv("HOROVOD_TOPK_ISA", request.param)
        return update
    monkeypatch.setattr(native, "find", lambda: SimpleNamespace(library=None))
    return update


def test_codes_are_rounded_to_nearest_and_change_by_one_at_least() -> None:
    phi = (np.arange(256) / 255) ** 4
    for arrives in (0, 1):
        exact = 255 * (phi * 0.9 + 0.1 * arrives) ** 0.25
        found = np.array(AFTER[arrives])
        is_end = np.arange(256) == 255 * arrives
        is_nearest = np.abs(found - exact) <= 0.5
        assert is_end[found == np.arange(256)].all()
        assert (is_nearest | (found == np.arange(256) + (1 if arrives else -1)) | is_end).all()
        code = 255 - 255 * arrives
        for _ in range(255):
            code = AFTER[arrives][code]
        assert code == 255 * arrives
    assert [bool(formulas.arrives_often(code)) for code in (OFTEN - 1, OFTEN)] == [False, True]
    assert phi[OFTEN - 1] <= 0.5 < phi[OFTEN]


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_all_codes_change_as_the_formula_says(by: Any, kind: torch.dtype) -> None:
    for numbers in (Sgd(MU, LR, 0.0, False, 0.5), adam_of(BETAS, 3, LR, (0.0, 0.0), 1e-8)):
        codes = torch.arange(256, dtype=torch.uint8).repeat(2)
        gradient = torch.arange(2, dtype=kind).repeat_interleave(256) * 1e-30
        p, damping = torch.ones(512, dtype=kind), torch.ones(2, dtype=kind)
        moments = [torch.ones(512, dtype=kind) for _ in range(2 - isinstance(numbers, Sgd))]
        by([Update(p, gradient, False, codes, damping, numbers, moments)])
        assert torch.equal(codes, torch.tensor(AFTER, dtype=torch.uint8).view(-1))


def numbers() -> Iterator[Sgd | Adam]:
    for decay in (0.0, DECAY):
        for nesterov in (False, True):
            yield Sgd(MU, LR, decay, nesterov, 0.375)
        for step in (1, 3, 50):
            yield adam_of(BETAS, step, LR, (decay, DECAY - decay), 1e-8)


@pytest.mark.skipif(FOUND.library is None, reason="there are no kernels")
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("isa", ISAS[: FASTEST + 1])
def test_kernels_have_the_bits_of_pytorchs_operations(
    isa: str, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For float64 PyTorch's roots are nearly, but not always, rounded correctly."""
    monkeypatch.setenv("HOROVOD_TOPK_ISA", isa)
    near: dict[str, Any] = (
        {"rtol": 0.0, "atol": 0.0} if kind == torch.float32 else {"rtol": 1e-12, "atol": 1e-14}
    )
    torch.manual_seed(0)
    for each in numbers():
        for more in (False, True):  # maximize, and amsgrad
            codes = torch.randint(256, (4999,), dtype=torch.uint8)
            gradient, p = sparse(4999, kind=kind), torch.randn(4999, dtype=kind)
            gradient[:3] = torch.tensor([1e-40, -0.0, 1e18])
            moments = [torch.randn(4999, dtype=kind)]
            if isinstance(each, Adam):
                moments += [torch.rand(4999, dtype=kind) ** 4 for _ in range(1 + more)]
            damping = torch.tensor([0.75, 1.5], dtype=kind)
            one = Update(p, gradient, more, codes, damping, each, moments)
            other = replace(
                one, weight=p.clone(), codes=codes.clone(), moments=[m.clone() for m in moments]
            )
            before = p.clone()
            update([one])
            other.rms = one.rms
            update_by_torch(other)
            assert not torch.equal(p, before)
            pairs = (
                (p, other.weight),
                (codes, other.codes),
                *zip(moments, other.moments, strict=True),
            )
            for mine, its in pairs:
                torch.testing.assert_close(mine, its, **near, equal_nan=False)


@pytest.mark.parametrize("rms", [math.nan, math.inf, -math.nan])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_a_weight_that_is_not_finite_leaves_others_the_largest_limit(
    by: Any, kind: torch.dtype, rms: float
) -> None:
    """In kernels and in the formula: it was no limit there."""
    numbers = adam_of((0.9, 0.999), 1000, 1e-3, (0.0, 0.0), 1e-8)
    assert formulas.far(rms, numbers, formulas.NUMBERS) == coding.FREE
    p, moment = torch.full((64,), rms, dtype=kind), torch.full((64,), 1e9, dtype=kind)
    square, gradient = torch.full((64,), 1e-6, dtype=kind), torch.zeros(64, dtype=kind)
    p[0], gradient[0] = 1.0, 1e-3
    codes, damping = torch.full((64,), 255, dtype=torch.uint8), torch.ones(2, dtype=kind)
    one = Update(p, gradient, False, codes, damping, numbers, [moment, square])
    by([one])
    assert one.rms is not None and not one.rms.isfinite()
    limit = coding.FREE * numbers.most * math.sqrt(1e-6)
    assert moment[0].item() == pytest.approx(limit, rel=1e-6)
    assert p[0].item() == pytest.approx(1.0 - 1e-3 * coding.FREE, rel=1e-3)


# Updates around the steps of an optimizer.


class Known(Updates):
    """Updates of one optimizer's parameters, whose factors and losses are given."""

    def __init__(self, optimizer: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.flagged: tuple[str, ...] = ()
        self.config = SimpleNamespace(ratio=0.1)
        compressor: Any = SimpleNamespace(step=self, counter=SimpleNamespace(committed=0))
        super().__init__({p: str(at) for at, p in enumerate(parameters)}, compressor)
        kind = parameters[0].dtype
        self.codes = [torch.zeros(p.numel(), dtype=torch.uint8) for p in parameters]
        self.damping, self.cut = torch.ones(2, dtype=kind), 0.0
        self.known = {*map(str, range(len(parameters)))}  # names of those that are compressed
        optimizer.register_step_pre_hook(lambda it, *_: self.begin(it))
        optimizer.register_step_post_hook(lambda it, *_: self.end(it))

    def _arrived(self) -> Iterator[Any]:
        for at, codes in enumerate(self.codes):
            if str(at) in self.known:
                yield str(at), (codes, self.damping, self.cut)


SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
EACH: list[tuple[Any, dict[str, Any]]] = [
    (SGD, {}),
    (SGD, {"nesterov": True}),
    (SGD, {"maximize": True, "foreach": True}),
    (SGD, {"weight_decay": 0.0, "foreach": False}),
    (SGD, {"fused": True, "lr": torch.tensor(LR)}),
    (ADAM, {}),
    (ADAM, {"maximize": True, "amsgrad": True, "foreach": True}),
    (ADAM, {"decoupled_weight_decay": True}),
    (ADAMW, {}),
    (ADAMW, {"amsgrad": True, "maximize": True, "foreach": False}),
    (ADAMW, {"fused": True, "lr": torch.tensor(LR)}),
    (ADAMW, {"betas": (0.9, 0.0), "weight_decay": 0.0}),
]
each_optimizer = pytest.mark.parametrize(
    ("kind", "options"), EACH, ids=[f"{kind.__name__} {options}" for kind, options in EACH]
)


def made(kind: Any, parameters: Any, **options: Any) -> Any:
    own = {"momentum": MU} if kind is SGD else {"betas": BETAS}
    return kind(parameters, **{"lr": LR, "weight_decay": DECAY} | own | options)


@each_optimizer
def test_steps_are_those_of_the_mathematics(by: Any, kind: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(8, 5, dtype=torch.float64))
    optimizer, exact = made(kind, [p], **options), Exact(p)
    known = Known(optimizer)
    for step in range(30):
        known.cut, known.damping = 0.5 * 0.9**step, torch.tensor([0.75, 1.5]).double()
        gradient = sparse(8, 5) * (8 if step % 7 == 3 else 1)
        gradient[0] = 1.0
        p.grad = gradient.clone()
        optimizer.step()
        exact.step(optimizer.param_groups[0], gradient, known.damping, known.cut)
        near: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-9}  # 0.05 in float32
        torch.testing.assert_close(p.detach(), torch.tensor(exact.p), **near)
        assert known.codes[0].tolist() == exact.codes.reshape(-1).tolist()
        assert torch.equal(p.grad, gradient)
    assert known.codes[0].min() < OFTEN - 40 < OFTEN <= known.codes[0].max()


@each_optimizer
def test_elements_that_always_arrive_have_the_optimizers_own_steps(
    kind: Any, options: dict[str, Any]
) -> None:
    """With c = 1, where Adam corrects no bias; training goes on from a dense state, and densely."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(8, 5, dtype=torch.float64) * 20)
    twin = nn.Parameter(p.detach().clone())
    dense, optimizer = made(kind, [twin], **options), made(kind, [p], **options)
    known: Any = None
    for step in range(220):
        p.grad = torch.randn(8, 5, dtype=torch.float64)
        twin.grad = p.grad.clone()
        if step == 200:
            known = Known(optimizer)
            known.codes[0].fill_(ALWAYS)
        if step == 210:
            known.known.clear()
        optimizer.step()
        dense.step()
        near: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-9}
        torch.testing.assert_close(p, twin, **near)
    assert known.codes[0].eq(ALWAYS).all()
    states = [its.state_dict()["state"][0] for its in (optimizer, dense)]
    torch.testing.assert_close(*states, **near)


@each_optimizer
def test_states_are_made_as_the_optimizer_makes_them(kind: Any, options: dict[str, Any]) -> None:
    found = []
    for compressed in (False, True):
        p = nn.Parameter(torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last))
        optimizer = made(kind, [p], **options)
        if compressed:
            Known(optimizer)
        for _ in range(2):
            p.grad = torch.ones_like(p)
            optimizer.step()
        state = optimizer.state_dict()["state"][0]
        facts = {k: (v.dtype, v.device, v.shape, v.stride()) for k, v in state.items() if v.dim()}
        steps = {k: (v.dtype, v.device, float(v)) for k, v in state.items() if not v.dim()}
        found.append((list(state), facts, steps))
    assert found[0] == found[1]


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("dense_after", [8, 400])
def test_sgd_applies_every_gradient_once(nesterov: bool, dense_after: int) -> None:
    """It moves its weight by lr / (1 - momentum) in all, also if compression ends."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.zeros(40, dtype=torch.float64))
    optimizer = made(SGD, [p], nesterov=nesterov, weight_decay=0.0)
    known, total = Known(optimizer), torch.randn(40, dtype=torch.float64)
    optimizer.state[p]["momentum_buffer"] = total.clone()  # of dense steps
    total *= MU**2 if nesterov else MU
    for step in range(400):
        p.grad = sparse(40) if step < 8 else torch.zeros(40, dtype=torch.float64)
        total += p.grad
        if step >= dense_after:
            known.known.clear()
        optimizer.step()
    torch.testing.assert_close(p.detach(), -LR / (1 - MU) * total, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("start", [0.0, 8.0])
def test_adam_moves_no_weight_farther_than_the_limit(start: float) -> None:
    """It is the learning rate, or a fifth of the rms if that is more, which grows for 100 steps."""
    p = nn.Parameter(torch.full((40,), start))
    optimizer = torch.optim.AdamW([p], lr=0.5, weight_decay=0.0)
    known, moved, limits = Known(optimizer), list[float](), list[float]()
    for step in range(101):
        known.codes[0].fill_(140)  # phi is about 0.1
        before, p.grad = p.detach().clone(), torch.zeros(40)
        rms = float(before.square().mean().sqrt())
        if step in (0, 50, 100):
            p.grad[20 * (step == 0) :] = 3.0
        optimizer.step()
        moved.append(float((p.detach() - before).abs().max()))
        limits.append(max(0.5, min(1.0, (step + 1) / 100) * rms / 5))
    assert all(d <= limit * 1.0001 for d, limit in zip(moved, limits, strict=True))
    assert [moved[at] for at in (0, 50, 100)] == pytest.approx([limits[at] for at in (0, 50, 100)])
    assert (moved[100] > 1.0) == (start > 0.0)


# Steps that do not end, or are not made.


def everything(optimizer: Any, known: Known) -> list[Tensor]:
    """Copies of weights, of the optimizer's state and of codes."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = [each for p in parameters for each in optimizer.state.get(p, {}).values()]
    return [each.detach().clone() for each in (*parameters, *states, *known.codes)]


@each_optimizer
def test_a_step_that_raises_or_is_skipped_has_not_happened(
    kind: Any, options: dict[str, Any]
) -> None:
    found = []
    for fails in (False, True):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(8, 5))
        optimizer = made(kind, [p], **options)
        known = Known(optimizer)
        for step in range(6):
            p.grad = gradient = sparse(8, 5, kind=torch.float32)
            if fails and step in (0, 3):
                before = everything(optimizer, known)
                broken = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
                with suppress(ZeroDivisionError):
                    optimizer.step()
                broken.remove()
                known.undo()
                assert p.grad is gradient
                if options.get("fused"):
                    optimizer.grad_scale = optimizer.found_inf = torch.tensor(1.0)
                    optimizer.step()
                    del optimizer.grad_scale, optimizer.found_inf
                after = everything(optimizer, known)
                # A fused step has made an empty state, and counts nothing.
                assert all(
                    map(torch.equal, before, after[:1] + after[len(after) - len(before) + 1 :])
                )
            optimizer.step()
        found.append(everything(optimizer, known))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("kind", [SGD, ADAMW])
def test_a_fused_step_divides_by_the_scale_once(kind: Any) -> None:
    """Also where it has raised before: gradients are shown as they were."""
    found = []
    for scale in (1.0, 8.0):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(40))
        optimizer = made(kind, [p], fused=True)
        known = Known(optimizer)
        for _ in range(4):
            p.grad = sparse(40, kind=torch.float32) * scale
            if scale != 1.0:
                optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.tensor(0.0)
            before = p.grad.clone()
            known.begin(optimizer)
            known.undo()
            assert torch.equal(p.grad, before)
            optimizer.step()
        found.append(everything(optimizer, known))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(
    ("kind", "changed", "shown"),
    [
        (SGD, {"momentum": 1.0}, "momentum=1 and dampening=0"),
        (SGD, {"dampening": 0.5}, "momentum=0.9 and dampening=0.5"),
        (SGD, {"lr": "fast"}, "lr='fast'"),
        (ADAMW, {"betas": (1.0, 0.9)}, r"betas=\(1, 0.9\)"),
        (ADAMW, {"betas": 0.9}, "betas=0.9"),
    ],
)
def test_a_setting_that_becomes_invalid_is_an_error_before_anything_changes(
    kind: Any, changed: dict[str, Any], shown: str
) -> None:
    p, other = (nn.Parameter(torch.ones(4)) for _ in range(2))
    optimizer = made(kind, [{"params": [p]}, {"params": [other]}])
    Known(optimizer)
    optimizer.param_groups[1].update(changed)
    p.grad, other.grad = torch.ones(4), torch.ones(4)
    with pytest.raises(ConfigError, match=f"has {shown}"):
        optimizer.step()
    assert not optimizer.state
    assert torch.equal(p.grad, torch.ones(4)) and torch.equal(other.grad, torch.ones(4))


def test_parameters_that_are_not_compressed_have_the_optimizers_own_step() -> None:
    """Also in a group of their own, and those of a group without momentum."""
    found = []
    for compressed in (False, True):
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(6)) for _ in range(3)]
        first, second, third = parameters
        groups = [{"params": [first, second]}, {"params": [third], "momentum": 0.0}]
        optimizer = made(SGD, groups, fused=True)
        if compressed:
            Known(optimizer).known = {"0", "2"}
        for step in range(3):
            for p in parameters:
                p.grad = torch.full((6,), step + 1.0)
            optimizer.step()
        found.append([p.detach() for p in parameters])
        assert third not in optimizer.state or "momentum_buffer" not in optimizer.state[third]
    own, ours = found
    assert not torch.equal(own[0], ours[0])
    assert torch.equal(own[1], ours[1]) and torch.equal(own[2], ours[2])


def test_a_second_moment_in_bfloat16_falls_after_a_large_gradient() -> None:
    """0.999 v is v in bfloat16, rounded to nearest. Rounded at random it falls as in float32."""
    size, steps = 4096, 300
    square, codes = torch.ones(size, dtype=torch.bfloat16), torch.zeros(size, dtype=torch.uint8)
    weight, gradient, mean = (torch.zeros(size, dtype=torch.bfloat16) for _ in range(3))
    for t in range(1, steps + 1):
        numbers = adam_of((0.9, 0.999), t, 1e-3, (0.0, 0.0), 1e-8)
        each = Update(weight, gradient, False, codes, torch.ones(2), numbers, [mean, square])
        each.rms, each.step = torch.tensor(0.0), t
        update_by_torch(each)
    exact = 0.999**steps
    assert float(square.double().mean()) == pytest.approx(exact, rel=0.005)
    assert float(square.double().std()) < 0.1 * exact  # of each element, too


@pytest.mark.parametrize("moves", [False, True])
def test_phi_begins_at_1_where_a_dense_momentum_moves(moves: bool) -> None:
    """After dense steps, such as a guard's, what has still to move does not move at once."""
    p = nn.Parameter(torch.zeros(4))
    optimizer = made(SGD, [p], weight_decay=0.0)
    known = Known(optimizer)
    optimizer.state[p]["momentum_buffer"] = torch.full((4,), float(moves))
    p.grad = torch.ones(4)
    optimizer.step()
    assert known.codes[0].eq(ALWAYS if moves else AFTER[True][0]).all()
    p.grad = torch.zeros(4)
    known.known.clear()
    optimizer.step()  # a dense one
    known.known.add("0")
    optimizer.step()
    assert known.codes[0].eq(AFTER[False][ALWAYS]).all()
