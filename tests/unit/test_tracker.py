"""What is followed of exchanges for the optimizer's update, against its formulas in NumPy."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from oracle.backends import NATIVE, NUMPY, TENSORFLOW, TORCH, Backend, each_of
from oracle.world import World, same_bits

from horovod_topk.core.exchange.reduce import state_plan
from horovod_topk.core.plan.buckets import TensorSpec, make_plan
from horovod_topk.core.plan.shards import first_block, shard_numel
from horovod_topk.errors import ConfigError
from horovod_topk.methods.topk import TopK
from horovod_topk.ops.coding import ALWAYS, OFTEN
from horovod_topk.ops.torch import DTYPES, TorchOps
from horovod_topk.updates.formulas import AFTER
from horovod_topk.updates.tracker import ADAM, CLASSES, SGD, TINY, Moments, Rule

Array = NDArray[Any]
BETA2 = 0.98
FOLLOWS = TopK(ratio=0.1, min_numel=1000, values="int8")
SPECS = [
    TensorSpec("large", (60, 40), "float32"),
    TensorSpec("small", (90,), "float32"),
    TensorSpec("other", (1500,), "float32"),
]
FOLLOWED = "large", "small", "other"
OF_ADAM = "arrivals", "energy", "factors", "lost"
each_backend = each_of(NUMPY, NATIVE, TENSORFLOW, rest=[TORCH])
some_backends = each_of(NUMPY, NATIVE, rest=[TORCH, TENSORFLOW])  # its eager operations are slow


class Followed(World):
    """Ranks whose optimizer writes how often elements arrive, as its update does."""

    def step(self, gradients: Any) -> Any:
        exchanged = self.exchange(gradients)
        ops, array = self.backend.ops, self.backend.array
        for compressor, own in zip(self.ranks, exchanged, strict=True):
            for follower, _ in () if compressor.step.flagged else compressor.step.followers():
                each: Any = follower
                for name, codes in zip(each.names, each.codes, strict=True):
                    arrives = (own[name].reshape(-1) != 0).astype(int)
                    after = np.array(AFTER)[arrives, self.backend.numpy(codes)]
                    ops.assign(codes, array(after, "uint8"))
        self.commit()
        return exchanged


def followed(
    ranks: int,
    backend: Backend,
    specs: Any = SPECS,
    *,
    rule: Rule = ADAM,
    reduction: str = "average",
    beta2: float = BETA2,
    **settings: Any,
) -> Followed:
    plan = make_plan(specs, replace(FOLLOWS, **settings), reduction, update_rule=rule)
    known = {spec.name: Moments(beta2, None) for spec in specs}
    return Followed(plan, ranks, backend, moments=known)


def codes_after(code: Array, g: Array) -> Array:
    """Codes after a step with an exchanged gradient."""
    found: Array = np.array(AFTER)[(g != 0).astype(int), code]
    return found


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


class Reference:
    """q, E and c of one tensor by the formulas, and D of each rank without owners."""

    def __init__(self, numel: int, ranks: int) -> None:
        self.codes = np.zeros(numel, int)
        self.energy, self.lost = np.zeros(CLASSES), np.zeros((ranks, CLASSES))

    def by_class(self, values: Array, often: Array) -> Array:
        return np.array([np.square(values[each], dtype="f8").sum() for each in (often, ~often)])

    def step(
        self, gradients: list[Array], before: list[Array], after: list[Array], g: Array
    ) -> None:
        """before, after: residuals of each rank; g: the exchanged mean."""
        often = self.codes >= OFTEN
        for rank, (gradient, e, left) in enumerate(zip(gradients, before, after, strict=True)):
            whole = gradient + e
            is_sent = np.abs(whole - left) * 2 > np.abs(whole)
            sums = [gradient, np.where(is_sent, whole, 0), np.where(is_sent, left, 0)]
            came, selected, rounding = (self.by_class(each, often) for each in sums)
            self.lost[rank] = BETA2 * self.lost[rank] + came - selected + rounding
        self.codes = codes_after(self.codes, g)
        self.energy = BETA2 * self.energy + self.by_class(g, often)

    @property
    def damping(self) -> Array:
        lost = self.lost.mean(0)
        lost = np.where(lost < 0, np.maximum([0, -0.75] * self.energy, lost / len(self.lost)), lost)
        total = self.energy + lost
        share = np.divide(lost, total, out=np.zeros(CLASSES), where=total > 0)
        found: Array = np.sqrt(1 - 0.99 * share)
        return found


@each_backend
@pytest.mark.parametrize("reduction", ["average", "sum"])
def test_states_are_those_of_the_formulas(backend: Backend, reduction: str) -> None:
    world, references = followed(3, backend, reduction=reduction), dict[str, Reference]()
    scale, steps = 3 if reduction == "sum" else 1, 2 if backend is TENSORFLOW else 12
    for step in range(steps):
        gradients = drawn(3, step)
        before, exchanged = world.residuals(), world.step(gradients)
        for name in FOLLOWED:
            came, e, left = (
                [one[name].reshape(-1) for one in each]
                for each in (gradients, before, world.residuals())
            )
            reference = references.setdefault(name, Reference(came[0].size, 3))
            reference.step(came, e, left, exchanged[0][name].reshape(-1) / scale)
    states = {key: saved(world, key) for key in OF_ADAM}
    for name, reference in references.items():
        for rank in range(3):
            of = {key: states[key][rank][name] for key in OF_ADAM}
            assert np.array_equal(of["arrivals"], reference.codes)
            np.testing.assert_allclose(of["energy"], reference.energy, 1e-4)
            np.testing.assert_allclose(of["lost"], reference.lost[rank], 1e-3, 1e-3)
            np.testing.assert_allclose(of["factors"], reference.damping, 1e-4)
    large = references["large"]
    if steps == 12:
        assert large.damping.min() < 0.9, "the case has to swing"
        assert np.count_nonzero(large.codes >= OFTEN) > 10


@pytest.mark.parametrize("backend", [NUMPY, NATIVE], ids=lambda each: each.name)
def test_owners_tell_what_they_lose(backend: Backend) -> None:
    """An owner selects again; what that takes away enters D one step later."""
    world = followed(3, backend, exchange="sharded")
    expected = [np.zeros(CLASSES) for _ in range(3)]
    for step in range(6):
        gradients, before, owned = drawn(3, step), world.residuals(), world.owned()
        codes, exchanged = saved(world, "arrivals")[0]["large"], world.step(gradients)
        for rank in range(3):
            mine = np.arange(2400) // 512 % 3 == first_block("large", 3, rank)
            often, scale = codes[mine] >= OFTEN, 2400 / mine.sum()
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


@some_backends
def test_factors_are_at_most_1_for_elements_that_arrive_often_and_2_for_others(
    backend: Backend,
) -> None:
    found = dict[int, Array]()
    for power, fading in ((1, 1.0), (8, 0.9)):  # sums have much more energy than gradients
        world, random = followed(1, backend, values="float32"), np.random.default_rng(0)
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


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["normal", "heavy"])
def test_a_sample_of_a_large_tensor_has_its_energies(kind: str) -> None:
    spec = TensorSpec("huge", (1 << 18,), "float32")
    world = followed(2, TORCH, [spec], ratio=0.02)
    random = np.random.default_rng(0)
    total = 0.0
    for _ in range(8):
        draw: Any = random.standard_normal if kind == "normal" else partial(random.standard_t, 4)
        gradients = [{"huge": draw(1 << 18).astype(np.float32)} for _ in range(2)]
        exchanged = world.step(gradients)
        total = BETA2 * total + float(np.square(exchanged[0]["huge"], dtype="f8").sum())
    assert saved(world, "energy")[0]["huge"].sum() == pytest.approx(total, rel=0.15)
    (bucket,) = world.plan.buckets
    assert state_plan(bucket, "energy").numel == CLASSES


def followed_for_some_steps() -> Followed:
    world = followed(3, NUMPY)
    for step in range(4):
        world.step(drawn(3, step))
    return world


def test_a_step_that_is_rolled_back_leaves_the_states_alone() -> None:
    world = followed_for_some_steps()
    before = {key: saved(world, key) for key in OF_ADAM}
    broken = drawn(3, 9)
    broken[1]["large"][0, 0] = np.nan
    world.step(broken)
    assert all(same_bits(states, saved(world, key)) for key, states in before.items())


def test_a_reset_drops_what_waits_and_keeps_what_was_learnt() -> None:
    """Else what the optimizer has still to move would move at once."""
    world = followed_for_some_steps()
    before = {key: saved(world, key) for key in OF_ADAM}
    for rank in world.ranks:
        rank.reset()
    assert not any(each.any() for rank in world.residuals() for each in rank.values())
    assert all(same_bits(states, saved(world, key)) for key, states in before.items())
    world.ranks[0].forget()
    assert not any(each.any() for key in OF_ADAM for each in saved(world, key)[0].values())


@pytest.mark.parametrize("way", ["absent", "of another size"])
def test_states_that_do_not_fit_are_no_error(way: str) -> None:
    """Checkpoints of older versions have none."""
    world = followed_for_some_steps()
    state = world.ranks[0].state_dict()
    for key in OF_ADAM:
        if way == "absent":
            del state[f"state.{key}"]
        else:
            state[f"state.{key}"]["residuals"]["other"] = np.ones(7, np.float32)
            state[f"state.{key}"]["shapes"]["other"] = [7]
    before = saved(world, "arrivals")[0]["large"]
    world.ranks[0].load_state_dict(state)
    found = saved(world, "arrivals")[0]
    assert not saved(world, "energy")[0]["other"].any()
    assert not found["other"].any()
    assert np.array_equal(found["large"], before) == (way != "absent"), "what fits is kept"


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
    gradient, arrivals = torch.randn(numel, dtype=kind), torch.randint(256, (numel,)).byte()
    before, left = torch.randn(own, dtype=kind), torch.randn(own, dtype=kind)
    left *= torch.rand(own) < 0.5
    apart = torch.zeros(64, dtype=kind)  # the tensor is not the first in its arenas
    kept, rest = (torch.cat([apart, each]) for each in (before, left))
    codes = torch.cat([apart.byte(), arrivals])
    places = ((64, 64, numel, *pick), (64, 64, 0, *pick))
    tensors = [gradient, gradient[:0]]
    states = [torch.ones(4, dtype=kind), *(torch.zeros(4, dtype=kind) for _ in range(3))]
    for residual, damping in ((kept, [0.5, 1.0]), (kept * 0.5, [])):
        found = states[3].clone()
        kernel = ops.tracker_kernels(tensors, [residual, rest, *states], damping).energy_withheld
        assert kernel is not None
        kernel(tensors, (residual, rest), codes, places, states)
    assert torch.equal(found, states[3])
    assert found[2:].tolist() == [0.0, 0.0]
    g, q = (ops.blocks([each], [(shards, first, parts)], dtype) for each in (gradient, arrivals))
    e, rest = (ops.blocks([each], [(1, 0, parts)], dtype) for each in (before * 0.5, left))
    is_sent = (g + e - rest).abs() * 2 > (g + e).abs()
    lost = g**2 - ((g + e) ** 2 - rest**2) * is_sent
    expected = torch.stack([lost[q >= OFTEN].double().sum(), lost[q < OFTEN].double().sum()])
    torch.testing.assert_close(found[:2].double(), expected, rtol=1e-5, atol=1e-4)


@some_backends
def test_a_huge_gradient_spoils_nothing_for_later(backend: Backend) -> None:
    world = followed(3, backend)
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
    plan = make_plan(specs, FOLLOWS, update_rule=ADAM)
    assert [len(bucket.tensors) for bucket in plan.buckets] == [8000, 1000]
    with pytest.raises(ConfigError, match="a group has 9000 tensors"):
        make_plan(specs, FOLLOWS, groups=[specs], update_rule=ADAM)


def test_auto_does_not_choose_an_exchange_that_hides_what_a_rank_has_sent() -> None:
    world = followed(4, NUMPY, exchange="auto")
    assert {rank.exchange.kind for rank in world.ranks} <= {"allgather", "sharded"}
    world.step(drawn(4, 0))


# SGD's states.


@pytest.mark.one_in(3)
@some_backends
@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
@pytest.mark.parametrize("reduction", ["average", "sum"])
def test_sgds_states_are_those_of_the_formulas(
    backend: Backend, exchange: str, reduction: str
) -> None:
    world = followed(3, backend, rule=SGD, reduction=reduction, exchange=exchange)
    codes, norms = dict[str, Array](), dict[str, float]()
    for step in range(8):
        gradients = drawn(3, step)
        if step == 5:
            gradients = [{n: 10 * g for n, g in one.items()} for one in gradients]
        exchanged = world.step(gradients)
        states = {key: saved(world, key) for key in ("arrivals", "norms", "factors")}
        for name in FOLLOWED:
            g = exchanged[0][name].reshape(-1)
            codes[name] = codes_after(codes.get(name, np.zeros(g.size, int)), g)
            limited, before = float(states["factors"][0][name][0]), norms.get(name, 0.0)
            norm = float(np.linalg.norm(g.astype("f8"))) / limited  # users get limited ones
            factor = min(1.0, 1.5 * before / norm) if before else 1.0
            norms[name] = 0.95 * before + 0.05 * norm if before else norm
            for rank in range(3):
                assert np.array_equal(states["arrivals"][rank][name], codes[name])
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
    world = followed(2, backend, rule=SGD)
    zeros = {s.name: np.zeros(s.shape, np.float32) for s in SPECS}
    broken = drawn(2, 1)
    broken[0]["large"][0, 0] = np.inf
    for gradients in ([zeros, zeros], drawn(2, 0), broken, [zeros, zeros], drawn(2, 2)):
        world.step(gradients)
        for key in ("norms", "factors"):
            assert all(np.isfinite(each).all() for each in saved(world, key)[0].values())
    assert saved(world, "norms")[0]["large"] > 0


def test_a_payload_of_sgd_carries_no_measures() -> None:
    plan, plain = (make_plan(SPECS, FOLLOWS, update_rule=each) for each in (SGD, None))
    assert plan.buckets[0].payload_bytes == plain.buckets[0].payload_bytes


def constant(**values: float) -> list[Any]:
    """Gradients of one rank that are the same for all elements of a tensor."""
    return [{s.name: np.full(s.shape, values.get(s.name, 1.0), np.float32) for s in SPECS}]


@each_backend
def test_a_spike_is_scaled_down_to_one_and_a_half_mean_norms(backend: Backend) -> None:
    world, before = followed(1, backend, rule=SGD, ratio=1.0, values="float32"), 0.0
    for scale, factor in ((1.0, 1.0), (1.0, 1.0), (10.0, 0.15), (0.0, 1.0), (1e30, TINY)):
        (exchanged,) = world.step(constant(large=scale))
        np.testing.assert_allclose(exchanged["large"], factor * scale, rtol=1e-5)
        assert (exchanged["small"] == 1.0).all()
        norms, damping = (saved(world, key)[0] for key in ("norms", "factors"))
        assert [damping["large"], damping["small"]] == pytest.approx([factor, 1.0], rel=1e-5, abs=0)
        if scale in (0.0, 1e30):
            assert norms["large"] == before
        before = float(norms["large"][0])
    assert before == pytest.approx(2400**0.5 * (1 + 9 / 20), rel=1e-5)


def test_a_tensor_with_a_gradient_in_every_fifth_step_keeps_all_of_it() -> None:
    world = followed(1, NUMPY, rule=SGD, ratio=1.0, values="float32")
    for step in range(20):
        world.step(constant(large=float(step % 5 == 0)))
        assert saved(world, "factors")[0]["large"] == 1.0


@pytest.mark.parametrize("backend", [NUMPY, TORCH, TENSORFLOW], ids=lambda each: each.name)
def test_arrivals_that_earlier_versions_have_saved_are_loaded(backend: Backend) -> None:
    """They were phi itself, in float32; codes are 255 phi^(1/4)."""
    world = followed(1, backend, rule=SGD)
    world.step(drawn(1, 0))
    (rank,), phi = world.ranks, np.linspace(0, 1, 1500, dtype=np.float32)
    state = rank.state_dict()
    state["state.arrivals"]["residuals"]["other"] = backend.array(phi, "float32")
    rank.load_state_dict(state)
    codes = saved(world, "arrivals")[0]["other"]
    assert np.array_equal(codes, np.floor(255 * phi.astype("f8") ** 0.25 + 0.5))
    assert [codes[0], codes[-1]] == [0, ALWAYS]
