"""Arrivals, energies and Adam's steps by them, against their formulas in NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from oracle.backends import NATIVE, NUMPY, TENSORFLOW, TORCH, Backend
from oracle.world import World
from torch import Tensor, nn

from horovod_topk.core.arrivals import (
    CLASSES,
    FARTHEST,
    LEAST,
    LIMIT,
    OF_ADAM,
    RATE,
    Arrived,
    is_young,
)
from horovod_topk.core.plan import TensorSpec, make_plan
from horovod_topk.core.rounds import state_plan
from horovod_topk.core.shards import first_block, shard_numel
from horovod_topk.errors import ConfigError
from horovod_topk.kernels import native
from horovod_topk.methods.topk import TopK
from horovod_topk.ops.torch import DTYPES, TorchOps
from horovod_topk.ops.torch_moments import Moment, Numbers, _by_torch, prepare
from horovod_topk.torch_training.adam import AdamSteps, _largest

Array = NDArray[Any]
BETA2 = 0.98
FOLLOWS = TopK(ratio=0.1, min_numel=1000, values="int8", by_arrivals="adam", beta2=BETA2)
SPECS = [
    TensorSpec("large", (60, 40), "float32"),
    TensorSpec("small", (90,), "float32"),
    TensorSpec("other", (1500,), "float32"),
]
FOLLOWED = "large", "small", "other"
each_backend = pytest.mark.parametrize(
    "backend", [NUMPY, TORCH, NATIVE, TENSORFLOW], ids=lambda each: each.name
)


def worlds(backend: Backend, ranks: int = 3, reduction: str = "average", **settings: Any) -> World:
    return World(make_plan(SPECS, replace(FOLLOWS, **settings), reduction), ranks, backend)


def drawn(ranks: int, step: int) -> list[dict[str, Array]]:
    """Gradients that swing, with a mean that is common to all ranks."""
    random = np.random.default_rng(step)
    common = {s.name: np.random.default_rng(99).standard_normal(s.shape) for s in SPECS}
    swing = 1.5 * (-1.0) ** step
    return [
        {
            s.name: (swing * common[s.name] + random.standard_normal(s.shape)).astype(np.float32)
            for s in SPECS
        }
        for _ in range(ranks)
    ]


def saved(world: World, name: str) -> list[dict[str, Array]]:
    """The arrays of one state on every rank, by tensor name."""
    states = [rank.state_dict()[f"state.{name}"]["residuals"] for rank in world.ranks]
    to_numpy = world.backend.numpy
    return [{n: np.array(to_numpy(each)) for n, each in one.items()} for one in states]


YOUNG = 100  # steps in which moments are limited if beta1 is 0.9


class Reference:
    """phi, E and c of one tensor by the formulas, and D of each rank without owners."""

    def __init__(self, numel: int, ranks: int) -> None:
        self.phi = np.zeros(numel, np.float32)
        self.energy, self.lost = np.zeros(CLASSES), np.zeros((ranks, CLASSES))

    def by_class(self, values: Array, often: Array) -> Array:
        return np.array([np.square(values[each], dtype="f8").sum() for each in (often, ~often)])

    def step(
        self, gradients: list[Array], before: list[Array], after: list[Array], g: Array
    ) -> None:
        """before, after: residuals of each rank; g: the exchanged mean."""
        often = self.phi > 0.5
        for rank, (gradient, e, left) in enumerate(zip(gradients, before, after, strict=True)):
            whole = gradient + e
            is_sent = np.abs(whole - left) * 2 > np.abs(whole)
            sums = [gradient, np.where(is_sent, whole, 0), np.where(is_sent, left, 0)]
            came, selected, rounding = (self.by_class(each, often) for each in sums)
            self.lost[rank] = BETA2 * self.lost[rank] + came - selected + rounding
        self.phi = self.phi * np.float32(0.9) + np.float32(0.1) * (g != 0)
        self.energy = BETA2 * self.energy + self.by_class(g, often)

    @property
    def factors(self) -> Array:
        lost = self.lost.mean(0)
        lost = np.where(lost < 0, np.maximum([0, -0.75] * self.energy, lost / len(self.lost)), lost)
        total = self.energy + lost
        share = np.divide(lost, total, out=np.zeros(CLASSES), where=total > 0)
        found: Array = np.sqrt(1 - (1 - LEAST**2) * share)
        return found


@each_backend
@pytest.mark.parametrize("reduction", ["average", "sum"])
def test_states_are_those_of_the_formulas(backend: Backend, reduction: str) -> None:
    world, references = worlds(backend, reduction=reduction), dict[str, Reference]()
    scale = 3 if reduction == "sum" else 1
    for step in range(12):
        gradients = drawn(3, step)
        before = [
            {n: each.reshape(-1).copy() for n, each in one.items()} for one in world.residuals()
        ]
        exchanged = world.step([{n: g.copy() for n, g in one.items()} for one in gradients])
        after = world.residuals()
        for name in FOLLOWED:
            numel = gradients[0][name].size
            reference = references.setdefault(name, Reference(numel, 3))
            reference.step(
                [one[name].reshape(-1) for one in gradients],
                [one[name] for one in before],
                [one[name].reshape(-1) for one in after],
                exchanged[0][name].reshape(-1) / scale,
            )
    states = {key: saved(world, key) for key in OF_ADAM}
    for name, reference in references.items():
        for rank in range(3):
            of = {key: states[key][rank][name] for key in OF_ADAM}
            assert np.array_equal(of["arrivals"], reference.phi)
            np.testing.assert_allclose(of["energy"], reference.energy, 1e-4)
            np.testing.assert_allclose(of["lost"], reference.lost[rank], 1e-3, 1e-3)
            np.testing.assert_allclose(of["factors"], reference.factors, 1e-4)
    large = references["large"]
    assert large.factors.min() < 0.9, "the case has to swing"
    assert np.count_nonzero(large.phi > 0.5) > 10


@each_backend
@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
def test_ranks_have_the_same_factors_and_arrivals(backend: Backend, exchange: str) -> None:
    world = worlds(backend, 4, exchange=exchange)
    for step in range(10):
        world.step(drawn(4, step))
    for key in ("arrivals", "energy", "factors"):
        first, *others = saved(world, key)
        for other in others:
            assert all(np.array_equal(first[name], other[name]) for name in first)
    assert 0.1 < world.ranks[0].stats().step_factor < 0.9


@pytest.mark.parametrize("backend", [NUMPY, NATIVE], ids=lambda each: each.name)
def test_owners_tell_what_they_lose(backend: Backend) -> None:
    """An owner selects again; what that takes away enters D one step later."""
    world = worlds(backend, 3, exchange="sharded")
    expected = [np.zeros(CLASSES) for _ in range(3)]
    for step in range(6):
        gradients, before, owned = drawn(3, step), world.residuals(), world.owned()
        phi = saved(world, "arrivals")[0]["large"]
        before = [{n: each.copy() for n, each in one.items()} for one in before]
        owned = [{n: each.copy() for n, each in one.items()} for one in owned]
        exchanged = world.step([{n: g.copy() for n, g in one.items()} for one in gradients])
        for rank in range(3):
            mine = np.arange(2400) // 512 % 3 == first_block("large", 3, rank)
            often, scale = phi[mine] > 0.5, 2400 / mine.sum()
            reference = Reference(1, 1)

            def taken(came: Array, e: Array, left: Array) -> Array:
                whole = came + e
                is_sent = np.abs(whole - left) * 2 > np.abs(whole)
                parts = came, np.where(is_sent, whole, 0), np.where(is_sent, left, 0)
                each = [reference.by_class(part, often) for part in parts]  # noqa: B023
                return scale * (each[0] - each[1] + each[2])  # noqa: B023

            g = gradients[rank]["large"].reshape(-1)[mine]
            e, left = (
                each[rank]["large"].reshape(-1)[mine] for each in (before, world.residuals())
            )
            expected[rank] = BETA2 * expected[rank] + taken(g, e, left)
            e, left = (each[rank]["large"].reshape(-1) for each in (owned, world.owned()))
            came = exchanged[rank]["large"].reshape(-1)[mine] + left - e
            expected[rank] += taken(came, e, left)
    for rank in range(3):
        np.testing.assert_allclose(saved(world, "lost")[rank]["large"], expected[rank], 1e-3, 1e-2)


@pytest.mark.parametrize(("ranks", "mean"), [(1, 0.2), (8, 0.2)])
def test_the_factor_of_rare_elements_is_the_ratio_of_energies(ranks: int, mean: float) -> None:
    """Constant parts of gradients add up on each rank; the mean over ranks has less of that."""
    spec = TensorSpec("only", (100, 100), "float32")
    config = replace(FOLLOWS, ratio=0.02, values="float32", beta2=0.99)
    world = World(make_plan([spec], config), ranks, NATIVE)
    random, dense = np.random.default_rng(0), np.zeros(CLASSES)
    signs = np.sign(random.standard_normal(spec.shape))
    for _ in range(300):
        noise = random.standard_normal((ranks, *spec.shape))
        gradients = [{"only": (mean * signs + each).astype(np.float32)} for each in noise]
        often = saved(world, "arrivals")[0].get("only", np.zeros(10_000)) > 0.5
        average = np.mean([one["only"] for one in gradients], 0).reshape(-1)
        dense = 0.99 * dense + Reference(1, 1).by_class(average, often)
        world.step(gradients)
    energy, factors = (saved(world, key)[0]["only"] for key in ("energy", "factors"))
    expected = np.sqrt(energy[1] / dense[1])
    assert 1.0 < expected < 1.9
    np.testing.assert_allclose(factors[1], expected, rtol=0.06)


@each_backend
def test_factors_are_at_most_1_for_elements_that_arrive_often_and_2_for_others(
    backend: Backend,
) -> None:
    found = dict[int, Array]()
    for power, fading in ((1, 1.0), (8, 0.9)):  # sums have much more energy than gradients
        world, random = worlds(backend, 1, values="float32"), np.random.default_rng(0)
        steady = {s.name: random.random(s.shape) ** power for s in SPECS}
        for step in range(40):
            world.step([{n: (fading**step * g).astype("f4") for n, g in steady.items()}])
        lost, found[power] = (
            np.stack([saved(world, key)[0][n] for n in ("large", "other")])
            for key in ("lost", "factors")
        )
        assert (lost[:, int(power == 1)] < 0).all()
    np.testing.assert_allclose(found[1][:, 1], (1 + 0.99 * 3) ** 0.5, rtol=1e-3)
    assert found[8][:, 0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("kind", ["normal", "heavy"])
def test_a_sample_of_a_large_tensor_has_its_energies(kind: str) -> None:
    spec = TensorSpec("huge", (1 << 18,), "float32")
    world = World(make_plan([spec], replace(FOLLOWS, ratio=0.02)), 2, TORCH)
    random = np.random.default_rng(0)
    total = 0.0
    for _ in range(8):
        draw = random.standard_normal if kind == "normal" else partial_t(random)
        gradients = [{"huge": draw(1 << 18).astype(np.float32)} for _ in range(2)]
        exchanged = world.step(gradients)
        total = BETA2 * total + float(np.square(exchanged[0]["huge"], dtype="f8").sum())
    assert saved(world, "energy")[0]["huge"].sum() == pytest.approx(total, rel=0.15)
    (bucket,) = world.plan.buckets
    assert state_plan(bucket, "energy").numel == CLASSES


def partial_t(random: np.random.Generator) -> Any:
    """Student's t, with four degrees of freedom."""
    return lambda size: random.standard_t(4, size)


def test_a_step_that_is_rolled_back_leaves_the_states_alone() -> None:
    world = worlds(NUMPY)
    for step in range(4):
        world.step(drawn(3, step))
    before = {key: saved(world, key) for key in OF_ADAM}
    broken = drawn(3, 9)
    broken[1]["large"][0, 0] = np.nan
    world.step(broken)
    for key, states in before.items():
        for one, other in zip(states, saved(world, key), strict=True):
            assert all(np.array_equal(one[name], other[name]) for name in one)


def test_a_reset_drops_what_waits_and_keeps_what_was_learnt() -> None:
    """Else what the optimizer has still to move would move at once."""
    world = worlds(NUMPY)
    for step in range(4):
        world.step(drawn(3, step))
    before = {key: saved(world, key) for key in OF_ADAM}
    for rank in world.ranks:
        rank.reset()
    assert not any(each.any() for rank in world.residuals() for each in rank.values())
    for key, states in before.items():
        for one, other in zip(states, saved(world, key), strict=True):
            assert all(np.array_equal(one[name], other[name]) for name in one)
    world.ranks[0].forget()
    assert not any(each.any() for key in OF_ADAM for each in saved(world, key)[0].values())


def test_a_restarted_run_goes_on_with_the_same_states() -> None:
    one, other = worlds(NUMPY), worlds(NUMPY)
    for step in range(8):
        results = [one.step(drawn(3, step))]
        if step == 4:
            for rank, new in zip(one.ranks, other.ranks, strict=True):
                new.load_state_dict(rank.state_dict())
        if step > 4:
            results.append(other.step(drawn(3, step)))
            for key in OF_ADAM:
                pairs = zip(saved(one, key), saved(other, key), strict=True)
                assert all(np.array_equal(a[n], b[n]) for a, b in pairs for n in a)


@pytest.mark.parametrize("way", ["absent", "of another size"])
def test_states_that_do_not_fit_are_no_error(way: str) -> None:
    """Checkpoints of older versions have none."""
    world = worlds(NUMPY)
    for step in range(3):
        world.step(drawn(3, step))
    state = world.ranks[0].state_dict()
    for key in OF_ADAM:
        if way == "absent":
            del state[f"state.{key}"]
        else:
            state[f"state.{key}"]["residuals"]["other"] = np.ones(7, np.float32)
            state[f"state.{key}"]["shapes"]["other"] = [7]
    before = saved(world, "arrivals")[0]["large"]
    world.ranks[0].load_state_dict(state)
    after = saved(world, "arrivals")[0]
    assert not saved(world, "energy")[0]["other"].any()
    assert not after["other"].any()
    assert np.array_equal(after["large"], before) == (way != "absent"), "what fits is kept"


# Adam's own step, prepared by arrivals.


def reference_steps(
    kind: Any, settings: dict[str, Any], steps: list[tuple[Tensor, Tensor, Tensor]], start: Tensor
) -> Iterator[Tensor]:
    """Parameters after each step of (G, phi, c by element), in float64."""
    p, m, v = start.double(), torch.zeros_like(start).double(), torch.zeros_like(start).double()
    lr, decay, (beta1, beta2) = settings["lr"], settings["weight_decay"], settings["betas"]
    for t, (gradient, phi, c) in enumerate(steps, 1):
        rms = float(p.square().mean().sqrt())
        g = -gradient.double() if settings.get("maximize") else gradient.double()
        if kind is torch.optim.AdamW:
            p = p * (1 - lr * decay)
        else:
            g = g + decay * p
        b = beta1 * phi.double() ** 0.5 if t > 1 else torch.zeros_like(p)
        m = b * m + (1 - b) * (c.double() if t > 1 else 1.0) * g
        v = beta2 * v + (1 - beta2) * g**2
        root = (v / (1 - beta2**t)).sqrt()
        far = 1.0 if is_young(beta1, t) else max(1.0, FARTHEST * rms / lr)
        m = m.clamp(-far * root, far * root) if t > 1 else m
        p = p - lr * m / ((v / (1 - beta2**t)).sqrt() + 1e-8)
        yield p


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("kind", "more"),
    [(torch.optim.AdamW, {}), (torch.optim.Adam, {}), (torch.optim.Adam, {"maximize": True})],
)
def test_steps_of_adam_are_those_of_the_formula(
    kind: Any, more: dict[str, Any], fused: bool
) -> None:
    torch.manual_seed(0)
    parameter, untouched = nn.Parameter(torch.randn(8, 5)), nn.Parameter(torch.randn(6))
    twin = nn.Parameter(untouched.detach().clone())
    # With these betas far is 1 for 4 steps.
    settings = {"lr": 0.15, "weight_decay": 0.1, "betas": (0.5, 0.99), **more}
    optimizer = kind([parameter, untouched], fused=fused, **settings)
    plain = kind([twin], fused=fused, **settings)
    arrived = dict[str, Arrived[Tensor]]()
    adam = AdamSteps({parameter: "known", untouched: "whole"}, lambda: arrived)
    optimizer.register_step_pre_hook(lambda it, *_: adam.prepare(it))
    steps, found = list[tuple[Tensor, Tensor, Tensor]](), list[Tensor]()
    start, factors = parameter.detach().clone(), torch.tensor([0.75, 1.5])
    for step in range(6):
        gradient = torch.randn(8, 5) * (torch.rand(8, 5) < 0.5) * (8 if step > 3 else 1)
        phi = torch.rand(40)
        before = (phi - 0.1 * gradient.view(-1).ne(0)) / 0.9
        c = torch.where(before > 0.5, factors[0], factors[1]).view(8, 5)
        steps.append((gradient, phi.view(8, 5), c))
        arrived["known"] = Arrived(phi, factors)
        parameter.grad, untouched.grad = gradient.clone(), torch.randn(6)
        twin.grad = untouched.grad.clone()
        optimizer.step()
        plain.step()
        found.append(parameter.detach().clone())
        assert torch.equal(untouched, twin)
    for mine, its in zip(found, reference_steps(kind, settings, steps, start), strict=True):
        torch.testing.assert_close(mine.double(), its, rtol=1e-4, atol=1e-5)


def test_each_parameter_has_the_limit_of_its_group_and_its_weights() -> None:
    torch.manual_seed(0)
    rates, starts = (0.1, 0.4), [torch.randn(8, 5), torch.randn(6) * 4.0]
    parameters = [nn.Parameter(each.clone()) for each in starts]
    groups = [{"params": [p], "lr": lr} for p, lr in zip(parameters, rates, strict=True)]
    groups[0]["params"].insert(0, nn.Parameter(torch.randn(6) * 9.0))  # beside another one
    optimizer = torch.optim.AdamW(groups, betas=(0.5, 0.99), weight_decay=0.0)
    names, factors = {p: str(p.numel()) for p in parameters}, torch.tensor([1.0, 2.0])
    arrived = dict[str, Arrived[Tensor]]()
    adam = AdamSteps(names | {groups[0]["params"][0]: "beside"}, lambda: arrived)
    optimizer.register_step_pre_hook(lambda it, *_: adam.prepare(it))
    steps: list[list[tuple[Tensor, Tensor, Tensor]]] = [[], []]
    for step in range(6):
        for p, own in zip(parameters, steps, strict=True):
            p.grad = torch.randn(p.shape) * (9 if step == 5 else 1)
            phi = torch.full((p.numel(),), 0.2)  # arrived rarely before this step
            own.append((p.grad, phi.view(p.shape), torch.full(p.shape, 2.0)))
            arrived[names[p]] = Arrived(phi, factors)
        arrived["beside"] = Arrived(torch.ones(6), factors)
        groups[0]["params"][0].grad = torch.randn(6)
        optimizer.step()
    for p, lr, own, start in zip(parameters, rates, steps, starts, strict=True):
        settings = {"lr": lr, "weight_decay": 0.0, "betas": (0.5, 0.99)}
        *_, its = reference_steps(torch.optim.AdamW, settings, own, start)
        torch.testing.assert_close(p.detach().double(), its, rtol=1e-4, atol=1e-5)


def test_elements_that_always_arrive_have_adams_own_steps() -> None:
    """Once there is no bias to correct, and v is old enough."""
    parameter = nn.Parameter(torch.randn(40))
    twin = nn.Parameter(parameter.detach().clone())
    settings: dict[str, Any] = {"betas": (0.5, 0.99)}
    optimizer = torch.optim.AdamW([parameter], **settings)
    plain = torch.optim.AdamW([twin], **settings)
    adam = AdamSteps({parameter: "p"}, lambda: {"p": Arrived(torch.ones(40), torch.ones(2))})
    for step in range(YOUNG + 5):
        parameter.grad = torch.randn(40)
        twin.grad = parameter.grad.clone()
        if step >= YOUNG:
            adam.prepare(optimizer)
        optimizer.step()
        plain.step()
        torch.testing.assert_close(parameter, twin, rtol=1e-6, atol=1e-7)
    moments = (o.state[p]["exp_avg"] for o, p in ((optimizer, parameter), (plain, twin)))
    torch.testing.assert_close(*moments, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("start", [0.0, 8.0])
def test_no_weight_moves_farther_than_the_limit(start: float) -> None:
    """It is the learning rate for 100 steps, and later a fifth of the rms if that is more."""
    parameter, settings = nn.Parameter(torch.full((40,), start)), {"lr": 0.5, "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([parameter], **settings)
    adam = AdamSteps(
        {parameter: "p"}, lambda: {"p": Arrived(torch.full((40,), 0.1), torch.ones(2))}
    )
    optimizer.register_step_pre_hook(lambda it, *_: adam.prepare(it))
    moved = list[float]()
    for step in range(YOUNG + 1):
        before = parameter.detach().clone()
        # Elements arrive for the first time after 50 steps, and again when v is old.
        parameter.grad = torch.full((40,), 3.0 if step in (0, 50, YOUNG) else 0.0)
        if step == 0:
            parameter.grad[:20] = 0.0
        optimizer.step()
        moved.append(float((parameter.detach() - before).abs().max()))
    assert max(moved[:YOUNG]) == pytest.approx(0.5, rel=1e-4)
    assert moved[50] == pytest.approx(0.5, rel=1e-4)
    rms = float(before.square().mean().sqrt())
    assert moved[YOUNG] == pytest.approx(max(0.5, FARTHEST * rms), rel=1e-4)
    assert (moved[YOUNG] > 1.0) == (start > 0.0)


def test_a_fused_step_that_a_scaler_skips_changes_no_moment() -> None:
    parameter = nn.Parameter(torch.randn(40))
    optimizer: Any = torch.optim.AdamW([parameter], fused=True)
    adam = AdamSteps({parameter: "p"}, lambda: {"p": Arrived(torch.rand(40), torch.rand(2))})
    optimizer.register_step_pre_hook(lambda it, *_: adam.prepare(it))
    parameter.grad = torch.randn(40)
    optimizer.step()
    before = optimizer.state[parameter]["exp_avg"].clone()
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(1.0)
    parameter.grad = torch.full((40,), torch.inf)
    optimizer.step()
    assert torch.equal(optimizer.state[parameter]["exp_avg"], before)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_a_step_of_adam_that_raises_before_its_update_leaves_its_moments_as_they_were(
    kind: Any,
) -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(8, 5))
    optimizer = kind([parameter], weight_decay=0.1)
    phi, c = torch.rand(40) * 0.9 + 0.1, torch.tensor([0.7, 1.4])
    adam = AdamSteps({parameter: "p"}, lambda: {"p": Arrived(phi, c)})
    before = torch.zeros(8, 5)
    for step in range(6):
        parameter.grad = torch.randn(8, 5) * (torch.rand(8, 5) < 0.5) + 1.0
        before = optimizer.state[parameter].get("exp_avg", before).clone()
        adam.prepare(optimizer)
        if step < 5:
            optimizer.step()
            adam.restore()
    assert float((optimizer.state[parameter]["exp_avg"] - before).norm()) > 0.1
    adam.undo()
    after = optimizer.state[parameter]["exp_avg"]
    is_known = after != 0.0
    assert is_known.sum() > 30, "some were limited"
    torch.testing.assert_close(after[is_known], before[is_known], rtol=1e-3, atol=1e-4)


def test_a_first_step_that_is_skipped_is_made_later() -> None:
    """The state of the optimizer is there then, and counts no step."""
    parameter = nn.Parameter(torch.randn(40))
    twin = nn.Parameter(parameter.detach().clone())
    optimizer: Any = torch.optim.AdamW([parameter], fused=True)
    plain = torch.optim.AdamW([twin], fused=True)
    adam = AdamSteps({parameter: "p"}, lambda: {"p": Arrived(torch.rand(40), torch.rand(2))})
    optimizer.register_step_pre_hook(lambda it, *_: adam.prepare(it))
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(1.0)
    parameter.grad = torch.full((40,), torch.inf)
    optimizer.step()
    del optimizer.grad_scale, optimizer.found_inf
    parameter.grad = torch.randn(40)
    twin.grad = parameter.grad.clone()
    optimizer.step()
    plain.step()
    assert torch.equal(parameter, twin)


@pytest.mark.parametrize("limit", [1.0, 1.7, 1e6])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_the_kernel_prepares_moments_to_the_same_bits(decay: float, limit: float) -> None:
    assert native.find().library is not None
    numbers = Numbers(0.9, 0.4, 0.5, 0.1, 0.45, 0.99)
    gradient = torch.randn(999) * (torch.rand(999) < 0.5)
    added, square = gradient + decay * torch.randn(999), torch.rand(999)
    start, prepared = torch.randn(999), list[Tensor]()
    own = added, gradient, torch.rand(999), torch.tensor([0.75, 0.3]), square, torch.tensor(limit)
    for by in (prepare, _by_torch):
        prepared.append(start.clone())
        by([Moment(prepared[-1], *own)], numbers)
    assert torch.equal(*prepared)
    most = (0.99 * square + 0.01 * added**2).sqrt() * limit * 1.00001
    assert ((prepared[0] + (1 / 0.9 - 1) * added).abs() <= most + 1e-6).all()
    assert not torch.equal(prepared[0], start)


@pytest.mark.parametrize("beta2", [0.99, 0.9999])
@pytest.mark.parametrize("steps", [1, YOUNG - 1, YOUNG])
@pytest.mark.parametrize(
    ("dtype", "rate"),
    [(torch.float32, 0.0), (torch.float32, 0.01), (torch.float64, 0.01), (torch.float64, 1.0)],
)
def test_keras_and_torch_prepare_the_same_moments(
    dtype: torch.dtype, rate: float, steps: int, beta2: float
) -> None:
    tf = pytest.importorskip("tensorflow")
    keras = pytest.importorskip("horovod_topk.tensorflow.arrivals")
    weights, young = torch.rand(999, dtype=dtype), is_young(0.9, steps + 1)
    assert young == (steps < YOUNG)
    of_tf = tf.constant(weights.numpy())
    its_far = keras._far(of_tf, rate)
    assert float(its_far) == pytest.approx({0.0: 2.0**20, 0.01: 20 * 3**-0.5, 1.0: 1.0}[rate], 0.1)
    gradient = torch.randn(999, dtype=dtype) * (torch.rand(999) < 0.5)
    arrived = torch.rand(999, dtype=dtype), torch.tensor([0.75, 0.3], dtype=dtype)
    moment, square = torch.randn(999, dtype=dtype), torch.rand(999, dtype=dtype)
    arrays = [tf.constant(each.numpy()) for each in (moment, square, gradient, *arrived)]
    given = (tf.constant(each, tf.float64) for each in (0.9, beta2, steps, rate))
    found = tf.function(keras._prepared)(*arrays, *given, of_tf)
    before, now = 1 - 0.9**steps, 1 - 0.9 ** (steps + 1)
    numbers = Numbers(0.9, before, now, RATE, LIMIT, beta2)
    most = now / 0.9 / (1 - beta2 ** (steps + 1)) ** 0.5
    (limit,) = _largest([weights], most, None if young else rate)
    prepare([Moment(moment, gradient, gradient, *arrived, square, limit)], numbers)
    np.testing.assert_allclose(found.numpy(), moment.numpy(), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("numel", "pick"),
    [(100, (1, 0, 1)), (5000, (1, 0, 3)), (20000, (3, 1, 1)), (40001, (3, 2, 5)), (512, (3, 1, 1))],
)
def test_the_kernel_finds_what_a_sample_loses(
    dtype: str, numel: int, pick: tuple[int, int, int]
) -> None:
    ops, kind = TorchOps(), DTYPES[dtype]
    own, (shards, first, parts) = shard_numel(numel, *pick[:2]), pick
    gradient, arrivals = torch.randn(numel, dtype=kind), torch.rand(numel, dtype=kind)
    before, left = torch.randn(own, dtype=kind), torch.randn(own, dtype=kind)
    left *= torch.rand(own) < 0.5
    apart = torch.zeros(64, dtype=kind)  # the tensor is not the first in its arenas
    kept, rest, phi = (torch.cat([apart, each]) for each in (before, left, arrivals))
    places = ((64, 64, numel, *pick), (64, 64, 0, *pick))
    tensors = [gradient, gradient[:0]]
    states = [torch.ones(4, dtype=kind), *(torch.zeros(4, dtype=kind) for _ in range(3))]
    assert ops.lost(tensors, (kept, rest), [0.5, 1.0], phi, places, states)
    found = states[3].clone()
    assert ops.lost(tensors, (kept * 0.5, rest), [], phi, places, states)
    assert torch.equal(found, states[3])
    assert found[2:].tolist() == [0.0, 0.0]
    g, phi = (ops.blocks([each], [(shards, first, parts)], dtype) for each in (gradient, arrivals))
    e, rest = (ops.blocks([each], [(1, 0, parts)], dtype) for each in (before * 0.5, left))
    is_sent = (g + e - rest).abs() * 2 > (g + e).abs()
    lost = g**2 - ((g + e) ** 2 - rest**2) * is_sent
    expected = torch.stack([lost[phi > 0.5].double().sum(), lost[phi <= 0.5].double().sum()])
    torch.testing.assert_close(found[:2].double(), expected, rtol=1e-5, atol=1e-4)


@each_backend
def test_a_huge_gradient_spoils_nothing_for_later(backend: Backend) -> None:
    world = worlds(backend)
    for step in range(6):
        gradients = drawn(3, step)
        factor = np.float32(1e20 if step == 2 else 1.0)
        world.step([{n: g * factor for n, g in one.items()} for one in gradients])
        for key in ("energy", "lost", "factors"):
            assert all(
                np.isfinite(each).all() for one in saved(world, key) for each in one.values()
            )
    assert 0.0999 < world.ranks[0].stats().step_factor <= 1.0


def test_more_tensors_than_a_header_can_count_go_to_several_buckets() -> None:
    specs = [TensorSpec(f"t{i}", (2,), "float32") for i in range(9000)]
    plan = make_plan(specs, FOLLOWS)
    assert [len(bucket.tensors) for bucket in plan.buckets] == [8000, 1000]
    with pytest.raises(ConfigError, match="a group has 9000 tensors"):
        make_plan(specs, FOLLOWS, groups=[specs])


def test_auto_does_not_choose_an_exchange_that_hides_what_a_rank_has_sent() -> None:
    world = World(make_plan(SPECS, replace(FOLLOWS, exchange="auto")), 4, NUMPY)
    assert {rank.exchange.kind for rank in world.ranks} <= {"allgather", "sharded"}
    world.step(drawn(4, 0))


# SGD's states.

TO_SGD = replace(FOLLOWS, by_arrivals="sgd", beta2=None)


@each_backend
@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
@pytest.mark.parametrize("reduction", ["average", "sum"])
def test_sgds_states_are_those_of_the_formulas(
    backend: Backend, exchange: str, reduction: str
) -> None:
    plan = make_plan(SPECS, replace(TO_SGD, exchange=exchange), reduction)
    world, phis, norms = World(plan, 3, backend), dict[str, Array](), dict[str, float]()
    for step in range(8):
        gradients = drawn(3, step)
        if step == 5:
            gradients = [{n: 10 * g for n, g in one.items()} for one in gradients]
        exchanged = world.step(gradients)
        states = {key: saved(world, key) for key in ("arrivals", "norms", "factors")}
        for name in FOLLOWED:
            g = exchanged[0][name].reshape(-1)
            phi = phis.get(name, np.zeros(g.size, np.float32))
            phis[name] = phi * np.float32(0.9) + np.float32(0.1) * (g != 0)
            limited, before = float(states["factors"][0][name][0]), norms.get(name, 0.0)
            norm = float(np.linalg.norm(g.astype("f8"))) / limited  # users get limited ones
            factor = min(1.0, 1.5 * before / norm) if before else 1.0
            norms[name] = 0.95 * before + 0.05 * norm if before else norm
            for rank in range(3):
                assert np.array_equal(states["arrivals"][rank][name], phis[name])
                found = {key: states[key][rank][name] for key in ("norms", "factors")}
                np.testing.assert_allclose(found["norms"], norms[name], 1e-5)
                np.testing.assert_allclose(found["factors"], factor, 1e-5)
            assert step > 5 or (factor < 0.5) == (step == 5), "the case has a spike"
        if step == 5:
            assert world.ranks[0].stats().step_factor < 0.5


@pytest.mark.parametrize("backend", [NUMPY, TORCH], ids=lambda each: each.name)
def test_a_gradient_of_zeros_and_one_that_is_not_finite_leave_norms_usable(
    backend: Backend,
) -> None:
    world = World(make_plan(SPECS, TO_SGD), 2, backend)
    zeros = {s.name: np.zeros(s.shape, np.float32) for s in SPECS}
    broken = drawn(2, 1)
    broken[0]["large"][0, 0] = np.inf
    for gradients in ([zeros, zeros], drawn(2, 0), broken, [zeros, zeros], drawn(2, 2)):
        world.step([{n: g.copy() for n, g in one.items()} for one in gradients])
        for key in ("norms", "factors"):
            assert all(np.isfinite(each).all() for each in saved(world, key)[0].values())
    assert saved(world, "norms")[0]["large"] > 0


def test_a_payload_of_sgd_carries_no_measures() -> None:
    plan, plain = (make_plan(SPECS, each) for each in (TO_SGD, replace(TO_SGD, by_arrivals=None)))
    assert plan.buckets[0].payload_bytes == plain.buckets[0].payload_bytes
