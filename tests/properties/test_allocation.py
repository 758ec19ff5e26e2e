"""Adaptive allocation: which tensors get more, at which bytes, and that nothing is lost by it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from oracle.backends import NUMPY, Backend, each_backend
from oracle.world import Gradients, World, same_bits

from horovod_topk.core.control import allocation
from horovod_topk.core.control.allocation import Allocator, is_due
from horovod_topk.core.plan.buckets import Plan, TensorSpec, make_plan
from horovod_topk.errors import ConfigError, PlanMismatchError
from horovod_topk.methods.protocol import SHARES
from horovod_topk.methods.topk import TopK

SPECS = [
    TensorSpec("small", (3000,), "float32"),
    TensorSpec("large", (50, 40), "float32"),
    TensorSpec("bias", (8,), "float32"),
    TensorSpec("middle", (2500,), "float32"),
]
SIZES = {"small": 0.01, "large": 1.0, "bias": 1.0, "middle": 0.1}  # of gradients


@pytest.fixture(autouse=True)
def _early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, "FIRST", 2)  # allocations after 2, 4, 8 committed steps


def plan(**settings: Any) -> Plan:
    common: dict[str, Any] = {"ratio": 0.02, "values": "float32", "allocation": "adaptive"}
    return make_plan(SPECS, TopK(**(common | settings)))


def gradients(step: int, ranks: int = 2, **sizes: float) -> list[Gradients]:
    random = np.random.default_rng(step)
    each = SIZES | sizes
    return [
        {s.name: (each[s.name] * random.standard_normal(s.shape)).astype("f4") for s in SPECS}
        for _ in range(ranks)
    ]


def trained(backend: Backend = NUMPY, **settings: Any) -> World:
    """Two ranks after the first allocation."""
    world = World(plan(**settings), 2, backend)
    for step in range(3):
        world.step(gradients(step))
    return world


def levels(world: World) -> dict[str, int]:
    (found,) = {rank.allocation for rank in world.ranks}
    return dict(found)


def test_allocations_are_ever_rarer() -> None:
    assert [step for step in range(70) if is_due(step)] == [2, 4, 8, 16, 32, 64]


# Which tensors get more.


def allocated(is_linear: bool, **squares: float) -> dict[str, int]:
    found = Allocator(plan(), is_linear=is_linear).allocate(squares)
    return dict(found or ())


def test_tensors_with_larger_gradients_get_more() -> None:
    mean = {"small": 1e-4 * 3000, "large": 1.0 * 2000, "middle": 1e-2 * 2500}
    linear, normalised = (allocated(each, **mean) for each in (True, False))
    assert linear["small"] < linear["middle"] < linear["large"]
    assert normalised["small"] < normalised["middle"] < normalised["large"]
    assert normalised["large"] - normalised["small"] < linear["large"] - linear["small"]


def test_equal_gradients_get_the_same() -> None:
    assert set(allocated(True, small=3000.0, large=2000.0, middle=2500.0).values()) == {0}


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_only_the_proportions_count(scale: float) -> None:
    squares = {"small": 3.0, "large": 2000.0, "middle": 40.0}
    scaled = {name: scale * square for name, square in squares.items()}
    assert allocated(True, **scaled) == allocated(True, **squares)


def test_a_tensor_without_gradients_gets_least() -> None:
    assert allocated(True, small=0.0, large=1.0, middle=1.0)["small"] == SHARES[0]


@pytest.mark.parametrize("square", [math.nan, math.inf])
def test_sums_that_are_not_finite_decide_nothing(square: float) -> None:
    assert allocated(True, small=square, large=1.0, middle=1.0) == {}
    assert allocated(True, small=0.0, large=0.0, middle=0.0) == {}


def test_a_ratio_by_hand_stays() -> None:
    given = plan(ratios={"large": 0.1})
    found = Allocator(given, is_linear=True).allocate({"small": 1.0, "large": 9.0, "middle": 1.0})
    assert dict(found or ()).keys() == {"small", "middle"}


# Laws.

PAIRS = [("allgather", "sign"), ("sharded", "int4"), ("hierarchical", "float32")]


@pytest.mark.parametrize(("exchange", "values"), PAIRS)
@each_backend
def test_ranks_agree_at_the_bytes_of_one_ratio(
    backend: Backend, exchange: str, values: str
) -> None:
    world = World(plan(exchange=exchange, values=values), 4, backend)
    usual = World(plan(exchange=exchange, values=values, allocation="uniform"), 4, backend)
    fixed, seen = usual.ranks[0].traffic(), set[int]()
    for step in range(5):
        exchanged = world.step(gradients(step, 4))
        assert same_bits(exchanged, [exchanged[0]] * 4)
        seen.update(each.traffic().sent_bytes for each in world.ranks)
    assert levels(world)["large"] > 0 > levels(world)["small"]
    # Payloads to owners are padded to the longest of them.
    assert max(seen) <= fixed.sent_bytes * (1.0 if exchange == "allgather" else 1.02)
    assert world.ranks[0].traffic().sent_bytes > 0.85 * fixed.sent_bytes


@each_backend
def test_until_the_first_allocation_a_step_is_one_of_one_ratio(backend: Backend) -> None:
    world, usual = (World(plan(allocation=each), 2, backend) for each in ("adaptive", "uniform"))
    for step in range(2):
        assert same_bits(world.step(gradients(step)), usual.step(gradients(step)))
    assert not same_bits(world.step(gradients(2)), usual.step(gradients(2)))


@each_backend
def test_nothing_is_lost_as_shares_change(backend: Backend) -> None:
    """g' + e_new == e_old + g, of one rank."""
    world = World(plan(), 1, backend)
    for step in range(5):
        before, (own,) = world.residuals()[0], gradients(step, 1, small=10.0 ** (step % 3))
        exchanged, after = world.step([own])[0], world.residuals()[0]
        for name, e in before.items():
            whole = e + own[name].reshape(-1)
            assert np.array_equal(exchanged[name].reshape(-1) + after[name], whole)


@each_backend
def test_a_restart_goes_on_with_the_allocation(backend: Backend) -> None:
    world = trained(backend)
    again = World(plan(), 2, backend)
    again.load(world)
    assert levels(again) == levels(world) != {}
    for step in range(3, 5):
        assert same_bits(again.step(gradients(step)), world.step(gradients(step)))
    assert same_bits(again.residuals(), world.residuals())


def test_a_rank_that_joins_learns_the_allocation() -> None:
    world = trained()
    joins, stays = World(plan(), 2, NUMPY).ranks[0], world.ranks[0]
    joins.forget()
    joins.resume(stays.clock)
    joins.take_shared(stays.shared_state())
    assert joins.allocation == stays.allocation != ()


def test_a_step_that_is_rolled_back_decides_nothing() -> None:
    world, other = World(plan(), 2, NUMPY), World(plan(), 2, NUMPY)
    for step in range(6):
        if step in (1, 3):  # of the next committed steps allocations follow
            bad = gradients(step)
            bad[1]["large"][0, 0] = np.nan
            before = levels(world) if step > 1 else {}
            world.step(bad)
            assert [dict(rank.allocation) for rank in world.ranks] == [before] * 2
        assert same_bits(world.step(gradients(step)), other.step(gradients(step)))


def test_other_ratios_are_shared_out_alike_and_dense_sends_all() -> None:
    world = trained(warmup=((1, 0.1),))
    usual = {tensor.spec.name: tensor.k for tensor in world.ranks[0].plan.tensors()}
    world.set_ratio(0.1)
    world.step(gradients(3))
    larger = {tensor.spec.name: tensor.k for tensor in world.ranks[0].plan.tensors()}
    assert larger["small"] == pytest.approx(5 * usual["small"], rel=0.1)
    assert larger["large"] == pytest.approx(5 * usual["large"], rel=0.1)
    world.set_ratio(1.0)
    world.step(gradients(4))
    assert not any(e.any() for one in world.residuals() for e in one.values())


def test_smaller_ratios_and_states_of_another_have_one_ratio_for_all() -> None:
    """Tensors that are sent whole at one ratio may not be at another: bytes would differ."""
    world = trained(ratio=0.1, warmup=((1, 0.05),))
    world.set_ratio(0.05)
    world.step(gradients(3))
    assert not world.ranks[0].stats().ratios
    other = World(plan(ratio=0.05), 2, NUMPY).ranks[0]
    other.load_state_dict(world.ranks[0].state_dict())
    assert world.ranks[0].allocation and other.allocation == ()


def test_ranks_with_different_allocations_are_refused() -> None:
    world = trained()
    world.ranks[1].allocation = tuple((name, -j) for name, j in world.ranks[1].allocation)
    with pytest.raises(PlanMismatchError, match="ranks disagree on a state"):
        world.step(gradients(3))


# What a user sees.


def test_stats_have_ratios_and_bytes() -> None:
    world = trained()
    stats = world.ranks[0].stats()
    tensors = {tensor.spec.name: tensor for tensor in world.ranks[0].plan.tensors()}
    assert stats.ratios["large"] > 0.02 > stats.ratios["small"]
    for name, ratio in stats.ratios.items():
        assert tensors[name].k == math.ceil(ratio * tensors[name].numel)
        assert stats.tensor_bytes[name] >= 4 * tensors[name].k
    assert "large 0.0" in str(stats)


def test_settings_that_are_refused() -> None:
    with pytest.raises(ConfigError, match="allocation='layer' is not one of"):
        TopK(allocation="layer")
