"""The Triton kernels for lists of tensors against the CPU kernels and torch's operations.

As in `test_triton`, the cases run in a pytest of their own: under Triton's interpreter, and where
there is a GPU on it as well.
"""

from __future__ import annotations

import ast
import importlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from test_triton import DEVICE, assert_same, needs_triton, run_cases, triton_version
from torch import Tensor

from benchmarks import gpu_compiled
from horovod_topk.core.exchange.reduce import state_plan
from horovod_topk.core.plan.buckets import BucketPlan, TensorSpec, make_plan
from horovod_topk.core.plan.shards import shard
from horovod_topk.core.run.follower import FollowerArenas
from horovod_topk.core.state.residual import Arenas
from horovod_topk.kernels import native, triton
from horovod_topk.methods.topk import TopK
from horovod_topk.ops.protocol import Place
from horovod_topk.ops.torch import DTYPES, TorchOps
from horovod_topk.updates import tracker
from horovod_topk.updates.formulas import Adam, Sgd, adam_of
from horovod_topk.updates.torch import Update, update, update_by_torch
from horovod_topk.updates.tracker import TINY, Moments, Rule, TensorSample, Tracker

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
@pytest.mark.tiers("tools", "rest", "all")
@pytest.mark.timeout(600)
def test_kernels_compile_without_a_gpu(tier: str) -> None:
    run_cases("compile_*", tier, __file__, TRITON_INTERPRET="0")


# What follows runs under `run_cases`.


def drawn(seed: int) -> list[Tensor]:
    """Draw normal numbers, and set half of them to 0."""
    generator = torch.Generator().manual_seed(seed)
    found = [torch.randn(n, generator=generator) for n in SIZES]
    return [each * (torch.rand(each.shape, generator=generator) < 0.5) for each in found]


def codes(seed: int) -> list[Tensor]:
    """Draw codes of how often elements arrive."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(256, (n,), generator=generator, dtype=torch.uint8) for n in SIZES]


def on_device(tensors: list[Tensor]) -> list[Tensor]:
    """Copy tensors to the device; the first copy lies at an odd address."""
    first = torch.cat([tensors[0][:1], tensors[0]]).to(DEVICE)[1:]
    return [first, *(each.clone().to(DEVICE) for each in tensors[1:])]


def places(parts: int, first: int) -> tuple[Place, ...]:
    """Return where samples of one shard of each tensor are."""
    found, start = list[Place](), 0
    for numel in SIZES:
        found.append((start, start, numel, *TensorSample(numel, parts, first).pick))
        start += numel  # the shard has less
    return tuple(found)


@pytest.fixture
def kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use Triton's kernels for lists on any device, and leave the CPU's own kernels out."""
    room = "horovod_topk.kernels.triton"
    monkeypatch.setattr(native, "find", lambda: native.Found(None, "left out"))
    monkeypatch.setattr(triton, "module", lambda name, _: importlib.import_module(f"{room}.{name}"))


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("numbers", ["sgd", "nesterov", "adam", "coupled", "young", "first"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.usefixtures("kernels_alone")
def case_updates(dtype: str, numbers: str, maximize: bool) -> None:
    """One launch updates tensors of several groups and layouts, with the bits of torch."""
    each_step = [drawn(step) for step in range(2)]
    # A weight becomes NaN in the first step: in the last one the others have the largest limit.
    each_step[0][3][7], each_step[0][3][8] = math.nan, -0.0
    start = [drawn(2), drawn(3), [each * each for each in drawn(4)], drawn(5), codes(6)]
    start[3] = [each.abs() for each in start[3]]
    is_sgd, has_largest = numbers in ("sgd", "nesterov"), numbers == "coupled"
    sides = list[list[Update]]()
    for device in ("cpu", DEVICE):
        own, side = [[each.clone() for each in some] for some in start], list[Update]()
        for at, (weight, *moments, code) in enumerate(zip(*own, strict=True)):
            damping = torch.tensor([1.0 - at / 10, 1.0 + at / 8]).to(device)
            kept = moments[: 1 if is_sgd else 3 if has_largest else 2]
            arrays = [weight, torch.zeros_like(weight), *kept]
            arrays = [each.to(device, DTYPES[dtype]) for each in arrays]
            if at == 0:  # at an odd address
                arrays = [torch.cat([each[:1], each])[1:] for each in arrays]
            if at == 1:
                arrays = [each.view(100, 50).t().contiguous().t() for each in arrays]
            pair, of = None if is_sgd else damping, numbers_of(numbers, at)
            both = arrays[0], arrays[1], maximize, code.to(device)
            side.append(Update(*both, pair, of, arrays[2:], step=2**24 - 1 - at))
        sides.append(side)
    for gradients in each_step:
        for side in sides:
            for each, gradient in zip(side, gradients, strict=True):
                each.gradient.copy_(gradient.view(each.gradient.shape))
        update(sides[1])
        for here, there in zip(*sides, strict=True):
            here.rms = None if there.rms is None else there.rms.cpu()
            update_by_torch(here)
            pairs = zip(*((e.weight, e.codes, *e.moments) for e in (here, there)), strict=True)
            for one, other in pairs:
                assert_same(one, other.cpu())


def numbers_of(name: str, at: int) -> Sgd | Adam:
    """Numbers of an update: those of every second tensor differ, as in another group."""
    rate, decay = (1e-2, 0.0) if at % 2 else (0.3, 1e-3)
    if name in ("sgd", "nesterov"):
        return Sgd(0.9, rate, decay, name == "nesterov", 0.5 if at < 4 else 0.0)
    coupled, decoupled = (decay, 0.0) if name == "coupled" else (0.0, decay)
    step = {"first": 1, "young": 50}.get(name, 2000) + at // 3
    return adam_of((0.9, 0.999), step, rate, (coupled, decoupled), 1e-8)


@pytest.mark.usefixtures("kernels_alone")
def case_roots_of_weights() -> None:
    from horovod_topk.kernels.triton.updates import lists

    weights, where = drawn(0), tuple((0, 0, n, *TensorSample(n).pick) for n in SIZES)
    expected = TorchOps(kernels=False).energies_of(weights, None, where, "float32")
    sizes = torch.tensor([TensorSample(n).size for n in SIZES])
    found = lists.rms(on_device(weights), where).cpu()
    torch.testing.assert_close(found, (expected / sizes).sqrt(), rtol=1e-6, atol=0.0)


@pytest.mark.usefixtures("kernels_alone")
def case_a_list_of_two_dtypes_takes_two_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    from horovod_topk.kernels.triton.updates import lists

    launched, launch = list[str](), lists.launch

    def note(kernel: Any, *arguments: Any, **constants: Any) -> None:
        launched.append(kernel.fn.__name__)
        launch(kernel, *arguments, **constants)

    monkeypatch.setattr(lists, "launch", note)
    some = list[Update]()
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        weight, gradient, buffer = (torch.ones(7, dtype=dtype, device=DEVICE) for _ in range(3))
        code = torch.zeros(7, dtype=torch.uint8, device=DEVICE)
        own = weight, gradient, False, code, None, numbers_of("sgd", 0), [buffer]
        some.append(Update(*own))
    update(some)
    assert launched == ["sgd"] * 2 and not any((each.weight == 1).any() for each in some)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def case_shards(dtype: torch.dtype) -> None:
    from horovod_topk.kernels.triton.updates import lists

    tensors, firsts = [each.to(dtype) for each in drawn(0)], [0, 2, 1, 0, 1, 2]
    expected = TorchOps(kernels=False).shards(tensors, 3, firsts)
    for one, other in zip(lists.shards(on_device(tensors), 3, firsts), expected, strict=True):
        assert_same(one.cpu(), other.float())


def case_what_kernels_refuse() -> None:
    from horovod_topk.kernels.triton.updates import lists

    a, b = torch.zeros(4, 5, device=DEVICE), torch.zeros(3, device=DEVICE)
    assert lists.suit([a], [b]) and lists.suit([a.t()]) and lists.suit([a.half()], [b])
    assert not lists.suit([a], [b.half()]) and not lists.suit([b, b.half()])
    assert not lists.suit([b.double()])
    assert DEVICE == "cpu" or not lists.suit([b], [torch.zeros(3)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("parts", "first"), [(1, 0), (3, 1)])
def case_energies(parts: int, first: int, dtype: torch.dtype) -> None:
    """What error feedback takes away; the kernel of the CPU adds it up in another order."""
    from horovod_topk.kernels.triton.updates import lists

    gradients, where = [each.to(dtype) for each in drawn(0)], places(parts, first)
    before, after, phi = (torch.cat(each) for each in (drawn(1), drawn(2), codes(3)))
    states = [torch.rand(2 * len(SIZES)) for _ in range(4)]
    states[0] = states[0][: len(SIZES)].repeat(2)
    given = [each.to(DEVICE) for each in (before, after, phi, *states)]
    lists.energy_withheld(on_device(gradients), (given[0], given[1]), given[2], where, given[3:])
    gradients = [each.float() for each in gradients]
    kernel = TorchOps().tracker_kernels(gradients, [before, after, *states]).energy_withheld
    assert kernel is not None
    kernel(gradients, (before, after), phi, where, states)
    torch.testing.assert_close(given[-1].cpu(), states[-1], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["average", "sum"])
def case_energies_of_owners(
    reduction: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an owner's error feedback takes away is added to what its gradients lose."""
    found = list[Tensor]()
    for side in sides("adam", monkeypatch, reduction):
        states, follower = side.owner()
        for arenas in follower._owned:
            for array, seed in ((arenas.residual, 1), (arenas.candidate, 2)):
                array.copy_(torch.cat(drawn(seed))[: array.numel()])
        states[tracker.ARRIVALS].residual.copy_(torch.cat(codes(3)))
        states[tracker.WITHHELD].candidate.fill_(0.5)
        exchanged = [each.to(side.device, dtype) for each in drawn(0)]
        follower.begin(exchanged)
        follower.finish(exchanged, 0.25, 2, torch.zeros(2, 8 * len(SIZES), dtype=torch.uint8))
        found.append(states[tracker.WITHHELD].candidate.cpu())
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
    assert (found[0] != 0.5).any()


def case_factors_of_adam(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that lose energy and gain it, sums over ranks, zeros and NaN: as without a kernel."""
    here, there = (side.follower() for side in sides("adam", monkeypatch))
    gain = 2.0**20
    for step, scale in enumerate((1.0, 1e-3, 0.0, 3.0, math.nan, 1.0)):
        gradients = [each * scale * gain for each in drawn(step)]
        for at in (0, 2):  # of which one class may have no element, and no NaN
            gradients[at].nan_to_num_()
        generator = torch.Generator().manual_seed(step)
        sent = torch.randn(3, 2 * len(SIZES) + 4, generator=generator)
        sent[:, 2:-2] *= torch.tensor(SIZES).repeat_interleave(2)
        sent = sent.view(torch.uint8)[:, 8:-8]
        for states, follower in (here, there):
            is_here = states is here[0]
            phi = states[tracker.ARRIVALS].residual
            phi.copy_(torch.cat(codes(step)))
            given = gradients if is_here else on_device(gradients)
            given[3] = given[3].view(64, 32).t().contiguous().t()
            follower.begin(given)
            follower.finish(given, gain, 3, sent.to(phi.device))
        for name in (tracker.ENERGY, tracker.DAMPING):
            one, other = here[0][name].candidate, there[0][name].candidate
            torch.testing.assert_close(other.cpu(), one, rtol=1e-5, atol=1e-6)
        for states, _ in (here, there):
            states[tracker.ENERGY].swap()
    assert float(one.min()) < 0.5 < 1.5 < float(one.max())


@pytest.mark.parametrize("small", [1 << 22, 100])
def case_spikes(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Usual norms, a spike, zeros, overflow and NaN; with a gain; states as without a kernel.

    Gradients with more than `small` elements are limited by a launch of their own.
    """
    from horovod_topk.kernels.triton.updates import lists, samples

    monkeypatch.setattr(samples, "SMALL", type(samples.SMALL)(small))
    monkeypatch.setattr(lists, "SMALL", small)
    here, there = (side.follower() for side in sides("sgd", monkeypatch))
    damping = list[float]()
    for step, scale in enumerate((1.0, 1.1, 40.0, 0.0, 1e30, 1e19, math.nan, 1.0)):
        gradients = [each * scale for each in drawn(step)]
        moved = on_device(gradients)
        for (states, follower), exchanged in ((here, gradients), (there, moved)):
            exchanged[3] = exchanged[3].view(64, 32).t().contiguous().t()
            follower.finish(exchanged, 0.25, 2, None)
            for name in (tracker.NORMS, tracker.DAMPING):
                states[name].swap()
        for name in (tracker.NORMS, tracker.DAMPING):
            one, other = here[0][name].residual, there[0][name].residual
            torch.testing.assert_close(other.cpu(), one, rtol=2e-6, atol=0.0)
        for left, right in zip(gradients, moved, strict=True):
            torch.testing.assert_close(right.cpu(), left, rtol=2e-6, atol=0.0, equal_nan=True)
        damping.append(float(here[0][tracker.DAMPING].residual[1]))
    assert 0.01 < damping[2] < 0.1 and damping[4] == TINY and damping.count(1.0) > 3


@dataclass
class Side:
    """A bucket with operations that use the kernels for lists, or that use none."""

    ops: TorchOps
    device: str
    bucket: BucketPlan

    def follower(self) -> tuple[dict[str, Arenas[Tensor]], Any]:
        """Make the follower of the bucket, and its states."""
        return self._follower([self.arenas(self.bucket)], (), 0)

    def _follower(self, *memory: Any) -> tuple[dict[str, Arenas[Tensor]], Any]:
        rule = self.bucket.update_rule
        assert isinstance(rule, Rule)
        names = rule.states(self.bucket.gradients[0])
        states = {
            name: self.arenas(state_plan(self.bucket, name), s.dtype) for name, s in names.items()
        }
        known, follows = (
            dict.fromkeys("012345", Moments(0.99, None)),
            FollowerArenas(*memory, states),
        )
        return states, Tracker(rule, self.ops, lambda: known).follower(self.bucket, follows)

    def owner(self) -> tuple[dict[str, Arenas[Tensor]], Any]:
        """Make the follower of the bucket on the second of three owners, and its states."""
        split = shard(self.bucket, 3)
        residuals = [self.arenas(plan) for plan in split.scatter]
        return self._follower(residuals, (self.arenas(split.gather[1]),), 1)

    def arenas(self, plan: BucketPlan, dtype: str = "") -> Arenas[Tensor]:
        kind = DTYPES[dtype or "float32"]
        pair = (torch.zeros(plan.numel, dtype=kind, device=self.device) for _ in range(2))
        return Arenas(plan, *pair)


def sides(
    optimizer: str, monkeypatch: pytest.MonkeyPatch, reduction: str = "sum"
) -> Iterator[Side]:
    from horovod_topk.kernels.triton.updates import lists

    monkeypatch.setattr(TorchOps, "_lists", lambda ops, device: lists if ops._use_kernels else None)
    for kernels, device in ((False, "cpu"), (True, DEVICE)):
        specs = [TensorSpec(str(i), (n,), "float32", device) for i, n in enumerate(SIZES)]
        config = TopK(ratio=0.1, values="float32")
        plan = make_plan(specs, config, reduction, update_rule=Rule(optimizer))
        yield Side(TorchOps(kernels=kernels), device, plan.buckets[0])


@pytest.mark.one_in(2, first=1)
@pytest.mark.parametrize("generation", ["80", "90", "gfx942"])
def compile_lists(generation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Denormals survive, each operation is correctly rounded, and no register is spilled."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for build in gpu_compiled.of_lists():
        found = build.compiled(generation)
        registers, spilled = gpu_compiled.resources(found)
        assert not spilled
        if ptx := found.get("ptx", ""):
            assert registers * 32 * build.warps <= 65_536
            rough = ".ftz", "fma.", "div.full", "div.approx", "sqrt.approx"
            assert not any(each in ptx for each in rough)


def test_kernels_assign_to_flat_tuples() -> None:
    """Triton 3.7, which PyTorch 2.13 for CUDA brings, cannot parse `(a, b), c = ...`."""
    nested = []
    for file in (Path(__file__).parents[2] / "horovod_topk/kernels/triton").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            targets = node.targets if isinstance(node, ast.Assign) else []
            found = (each for target in targets for each in getattr(target, "elts", ()))
            nested += [(file.name, each.lineno) for each in found if isinstance(each, ast.Tuple)]
    assert nested == []
