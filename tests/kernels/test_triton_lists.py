"""The Triton kernels for lists of tensors against the CPU kernels and torch's operations.

As in `test_triton`, the cases run in a pytest of their own: under Triton's interpreter, and where
there is a GPU on it as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from test_triton import DEVICE, assert_same, compiled, needs_triton, run_cases, triton_version
from torch import Tensor

from horovod_topk.core import arrivals
from horovod_topk.core.energies import Energies
from horovod_topk.core.momentum import Momenta, Momentum
from horovod_topk.core.norms import TINY, Norms
from horovod_topk.core.plan import BucketPlan, TensorSpec, make_plan
from horovod_topk.core.residual import Arenas
from horovod_topk.core.rounds import state_plan
from horovod_topk.core.samples import Sample
from horovod_topk.kernels import native, triton
from horovod_topk.methods.topk import TopK
from horovod_topk.ops import torch_buffers, torch_moments
from horovod_topk.ops import torch_lists as lists_of_items
from horovod_topk.ops.protocol import Place
from horovod_topk.ops.torch import TorchOps

SIZES = (5, 5000, 1, 2048, 70_001, 513)


@needs_triton
@pytest.mark.tiers("rest", "all")
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    (0,) < triton_version() < (3, 9), reason="Triton 3.6 does not interpret under NumPy 2.4"
)
def test_under_the_interpreter() -> None:
    run_cases("case_*", "all", __file__, TRITON_INTERPRET="1", TRITON_CASES_ON="cpu")


@needs_triton
@pytest.mark.timeout(600)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")
def test_on_a_gpu() -> None:
    run_cases("case_*", "all", __file__, TRITON_INTERPRET="0", TRITON_CASES_ON="cuda")


@needs_triton
@pytest.mark.timeout(600)
def test_kernels_compile_without_a_gpu() -> None:
    run_cases("compile_*", "all", __file__, TRITON_INTERPRET="0")


# What follows runs under `run_cases`.


def drawn(seed: int) -> list[Tensor]:
    """Draw normal numbers, and set half of them to 0."""
    generator = torch.Generator().manual_seed(seed)
    found = [torch.randn(n, generator=generator) for n in SIZES]
    return [each * (torch.rand(each.shape, generator=generator) < 0.5) for each in found]


def shares(seed: int) -> list[Tensor]:
    """Draw numbers from 0 to 1; both ends occur."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.rand(n, generator=generator) * 1.2 - 0.1).clamp(0, 1) for n in SIZES]


def on_device(tensors: list[Tensor]) -> list[Tensor]:
    """Copy tensors to the device; the first copy lies at an odd address."""
    first = torch.cat([tensors[0][:1], tensors[0]]).to(DEVICE)[1:]
    return [first, *(each.clone().to(DEVICE) for each in tensors[1:])]


def places(parts: int, first: int) -> tuple[Place, ...]:
    """Return where samples of one shard of each tensor are."""
    found, start = list[Place](), 0
    for numel in SIZES:
        found.append((start, start, numel, *Sample(numel, parts, first).pick))
        start += numel  # the shard has less
    return tuple(found)


@pytest.fixture
def kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use Triton's kernels for lists on any device, and leave the CPU's own kernels out."""
    from horovod_topk.kernels.triton import lists

    monkeypatch.setattr(native, "find", lambda: native.Found(None, "left out"))
    monkeypatch.setattr(triton, "for_lists", lambda kind: lists)


@pytest.mark.parametrize("decay", [0.0, 1e-3])
@pytest.mark.usefixtures("kernels_alone")
def case_momentum_buffers(decay: float) -> None:
    """Kernels prepare and restore all buffers but a transposed matrix, which torch does."""
    numbers = torch_buffers.Numbers(0.9, decay)
    given, losses = [drawn(0), drawn(1), drawn(2), shares(3)], [0.0, 0.5, 0.1, 0.5, 0.25, 0.3]
    found = [on_device(tensors) for tensors in given]
    for tensors in found[:3]:
        tensors[1] = tensors[1].view(100, 50).t().contiguous().t()
    buffers = [torch_buffers.Buffer(*row) for row in zip(*found, losses, strict=True)]
    splits = lists_of_items.by_kernels(buffers, torch_buffers._tensors)
    assert [(ours is not None, len(some)) for ours, some, _ in splits] == [(True, 5), (False, 1)]
    torch_buffers.prepare(buffers, numbers)
    for row in zip(*given, losses, strict=True):
        torch_buffers._prepare_by_torch([torch_buffers.Buffer(*row)], numbers)
    assert_near(given[0], found[0])
    torch_buffers.restore([(each.buffer, each.arrivals) for each in buffers], 0.9)
    for pair in zip(given[0], given[3], strict=True):
        torch_buffers._restore_by_torch([pair], 0.9)
    assert_near(given[0], found[0])


def assert_near(expected: list[Tensor], found: list[Tensor]) -> None:
    """Compare results: all are near, and equal but for number 1, which torch computes."""
    for position, (one, other) in enumerate(zip(expected, found, strict=True)):
        flat = other.reshape(-1)
        if position != 1:
            assert_same(one, flat)
        torch.testing.assert_close(flat.cpu(), one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("most", [1.0, 1e3])
@pytest.mark.usefixtures("kernels_alone")
def case_first_moments(most: float) -> None:
    """The kernel prepares moments with the bits of torch, where some are limited or none is."""
    gradients = drawn(0)
    factors = [torch.tensor([1.0 - at / 10, 1.0 + at / 8]) for at in range(len(SIZES))]
    squares = [each * each for each in drawn(3)]
    given = [
        drawn(1), [each + 0.01 for each in gradients], gradients, shares(2), factors, squares,
        [torch.tensor([most])[0] for _ in SIZES],
    ]  # fmt: skip
    found = [*map(on_device, given[:6]), [each.to(DEVICE) for each in given[6]]]
    start = [each.clone() for each in given[0]]
    numbers = torch_moments.Numbers(0.9, 0.19, 0.271, 0.1, 0.45, 0.999)
    moments = [torch_moments.Moment(*row) for row in zip(*found, strict=True)]
    splits = lists_of_items.by_kernels(moments, torch_moments._tensors)
    assert [len(some) for ours, some, _ in splits if ours is not None] == [len(SIZES)]
    torch_moments.prepare(moments, numbers)
    for row in zip(*given, strict=True):
        torch_moments._by_torch([torch_moments.Moment(*row)], numbers)
    for one, other, before in zip(given[0], found[0], start, strict=True):
        assert_same(one, other)
        assert one.numel() == 1 or not torch.equal(one, before)


def case_what_kernels_refuse() -> None:
    from horovod_topk.kernels.triton import lists

    a, b = torch.zeros(4, 5, device=DEVICE), torch.zeros(3, device=DEVICE)
    assert lists.suit([a], [b]) and lists.fit([a], [b])
    assert lists.suit([a.t()]) and not lists.fit([a.t()])
    assert not lists.suit([a], [b.half()]) and not lists.fit([b, b.double()])
    assert not lists.fit([torch.view_as_complex(torch.zeros(3, 2)).conj().imag])
    assert DEVICE == "cpu" or not lists.suit([b], [torch.zeros(3)])


def case_arrivals_and_factors() -> None:
    from horovod_topk.kernels.triton import lists

    ops, gradients, mean = TorchOps(kernels=False), drawn(0), torch.cat(shares(1))
    gradients[1][7], gradients[3][0] = math.nan, -0.0
    expected, out = torch.empty_like(mean), torch.empty_like(mean, device=DEVICE)
    ops.follow(mean, 0.1, gradients, expected)
    lists.follow(mean.to(DEVICE), 0.1, on_device(gradients), out)
    assert_same(expected, out)
    factors, found = torch.tensor([0.5, 1.0, 2.0, 0.1, 0.9, TINY]), on_device(gradients)
    lists.limit(found, factors.to(DEVICE))
    ops.limit(gradients, factors)
    for one, other in zip(gradients, found, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize(("parts", "first"), [(1, 0), (3, 1)])
def case_energies(parts: int, first: int) -> None:
    """What error feedback takes away; the kernel of the CPU adds it up in another order."""
    from horovod_topk.kernels.triton import lists

    gradients, where = drawn(0), places(parts, first)
    before, after, phi = (torch.cat(each) for each in (drawn(1), drawn(2), shares(3)))
    states = [torch.rand(2 * len(SIZES)) for _ in range(4)]
    states[0] = states[0][: len(SIZES)].repeat(2)
    given = [each.to(DEVICE) for each in (before, after, phi, *states)]
    lists.lost(on_device(gradients), (given[0], given[1]), given[2], where, given[3:])
    assert TorchOps().lost(gradients, (before, after), (), phi, where, states)
    torch.testing.assert_close(given[-1].cpu(), states[-1], rtol=1e-6, atol=1e-9)


def case_factors_of_adam(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that lose energy and gain it, sums over ranks, zeros and NaN: as without a kernel."""
    here, there = (energies(each) for each in sides("adam", monkeypatch))
    gain = 2.0**70
    for step, scale in enumerate((1.0, 1e-3, 0.0, 3.0, math.nan, 1.0)):
        gradients = [each * scale * gain for each in drawn(step)]
        lost = torch.randn(2 * len(SIZES), generator=torch.Generator().manual_seed(step))
        lost *= torch.tensor(SIZES).repeat_interleave(2)
        phi = torch.cat(shares(step))
        for side in (here, there):
            side[1]._read_betas()
            side[0][arrivals.ARRIVALS].residual.copy_(phi)
            given = gradients if side is here else on_device(gradients)
            given[3] = given[3].view(64, 32).t().contiguous().t()
            side[1].finish(given, gain, 3, lost.to(side[0][arrivals.ENERGY].residual.device))
        for name in (arrivals.ENERGY, arrivals.FACTORS):
            one, other = here[0][name].candidate, there[0][name].candidate
            torch.testing.assert_close(other.cpu(), one, rtol=1e-5, atol=1e-6)
        for side in (here, there):
            side[1].swap()
    assert float(one.min()) < 0.5 < 1.5 < float(one.max())


def case_spikes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Usual norms, a spike, zeros, overflow and NaN; with a gain; states as without a kernel."""
    here, there = (norms(each) for each in sides("sgd", monkeypatch))
    factors = list[float]()
    for step, scale in enumerate((1.0, 1.1, 40.0, 0.0, 1e30, 1e19, math.nan, 1.0)):
        gradients = [each * scale for each in drawn(step)]
        moved = on_device(gradients)
        for (_, each), exchanged in ((here, gradients), (there, moved)):
            each.limit(exchanged, 0.25)
            each.swap()
        for name in (arrivals.NORMS, arrivals.FACTORS):
            one, other = here[0][name].residual, there[0][name].residual
            torch.testing.assert_close(other.cpu(), one, rtol=2e-6, atol=0.0)
        for left, right in zip(gradients, moved, strict=True):
            torch.testing.assert_close(right.cpu(), left, rtol=2e-6, atol=0.0, equal_nan=True)
        factors.append(float(here[0][arrivals.FACTORS].residual[1]))
    assert 0.01 < factors[2] < 0.1 and factors[4] == TINY and factors.count(1.0) > 3


@dataclass
class Side:
    """A bucket with operations that use the kernels for lists, or that use none."""

    ops: TorchOps
    device: str
    bucket: BucketPlan

    def states(self, names: Sequence[str]) -> dict[str, Arenas[Tensor]]:
        plans = {name: state_plan(self.bucket, name) for name in names}
        return {name: self.arenas(plan) for name, plan in plans.items()}

    def arenas(self, plan: BucketPlan) -> Arenas[Tensor]:
        return Arenas(plan, *(torch.zeros(plan.numel, device=self.device) for _ in range(2)))


def sides(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Side]:
    from horovod_topk.kernels.triton import lists

    monkeypatch.setattr(TorchOps, "_lists", lambda ops, device: lists if ops._use_kernels else None)
    for kernels, device in ((False, "cpu"), (True, DEVICE)):
        specs = [TensorSpec(str(i), (n,), "float32", device) for i, n in enumerate(SIZES)]
        plan = make_plan(specs, TopK(ratio=0.1, values="float32", by_arrivals=optimizer), "sum")
        yield Side(TorchOps(kernels=kernels), device, plan.buckets[0])


def norms(side: Side) -> tuple[dict[str, Arenas[Tensor]], Norms[Tensor]]:
    states = side.states(arrivals.OF_SGD)
    return states, Norms(side.bucket, states, side.ops)


def energies(side: Side) -> tuple[dict[str, Arenas[Tensor]], Energies[Tensor]]:
    states, own = side.states(arrivals.OF_ADAM), [side.arenas(side.bucket)]
    momenta = Momenta(side.bucket.config, lambda: dict.fromkeys("012345", Momentum(0.99)))
    momenta.turn()
    return states, Energies(side.bucket, own, (), 0, states, side.ops, momenta)


ADDRESSES = (
    "table", "gradients", "arrays", "buffers", "added", "parameters", "losses", "moments",
    "squares", "largest",
)  # fmt: skip
FLAT = "mean", "before", "after", "scales", "fading", "lost", "gains", "residual", "candidate"


def types(**others: str) -> dict[str, str]:
    """Types of a kernel's arguments; those without one are float32 numbers."""
    found = dict.fromkeys(ADDRESSES, "*i64") | dict.fromkeys(FLAT, "*fp32")
    return {**found, "owners": "*i32", "arrivals": "*i64", "factors": "*i64", **others}


def compile_lists(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Denormals survive, and each operation is correctly rounded."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from horovod_topk.kernels.triton import elements, samples

    flat = {"arrivals": "*fp32", "factors": "*fp32", "out": "*fp32"}
    ptx = [
        compiled(elements.follow, 4, types(**flat)),
        compiled(elements.limit, 4, types(**flat)),
        compiled(elements.prepare_buffer, 4, types(), DECAYS=True),
        compiled(elements.restore_buffer, 4, types()),
        compiled(elements.prepare_moment, 4, types()),
        compiled(samples.spikes, 8, types(**flat)),
        compiled(samples.lost, 8, types(**flat)),
        compiled(samples.energies, 8, types(**flat)),
    ]
    for each in ptx:
        assert ".ftz" not in each and "fma." not in each
        assert not any(rough in each for rough in ("div.full", "div.approx", "sqrt.approx"))
