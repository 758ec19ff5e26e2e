"""Residuals that follow the learning rate: what is owed stays owed in units of updates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from oracle.backends import NATIVE, Backend, each_backend
from oracle.world import Gradients, World, drawn, same_bits

from horovod_topk.core.plan.buckets import Plan, TensorSpec, make_plan
from horovod_topk.core.state.learning_rates import FASTEST, SMALLEST, Rates, fall_of
from horovod_topk.core.state.reshard import pending
from horovod_topk.errors import PlanMismatchError
from horovod_topk.methods.topk import TopK

FALL = 1.0 - FASTEST
SIZES = {"body": 3000, "head": 1300, "bias": 40}
SPECS = [TensorSpec(name, (n,), "float32") for name, n in SIZES.items()]
RANKS = 4
EXCHANGES = ("allgather", "sharded", "hierarchical")
SCHEDULE = tuple(min(1.0, 0.2 * (step + 1)) * 0.96 ** max(0, step - 5) for step in range(12))


class Followed:
    """A job whose learning rates are what a test says they are.

    body has `rates[0]`, all other tensors `rates[1]`.
    """

    def __init__(
        self, plan: Plan, backend: Backend = NATIVE, *, update_rule: bool = True, ranks: int = RANKS
    ) -> None:
        self.world = World(plan, ranks, backend)
        self.rates = [1.0, 1.0]
        for each in self.world.ranks if update_rule else ():
            each.rates = Rates(self.now)

    def now(self) -> dict[str, float]:
        return {name: self.rates[name != "body"] for name in SIZES}

    def step(self, rates: Sequence[float], gradients: list[Gradients]) -> list[Gradients]:
        self.rates = list(rates)
        return self.world.step(gradients)

    def owed(self) -> Mapping[str, NDArray[Any]]:
        """All residuals together, in units of what is applied."""
        states = [each.state_dict() for each in self.world.ranks]
        total = pending(states, self.world.size, "average", self.world.backend.ops)
        return {name: self.world.backend.numpy(each) for name, each in total.items()}


def plan_of(**settings: Any) -> Plan:
    return make_plan(SPECS, TopK(**{"ratio": 0.02, "min_numel": 0, **settings}))


def gradients_of(steps: int, ranks: int = RANKS) -> Iterator[list[Gradients]]:
    random = np.random.default_rng(steps)
    for _ in range(steps):
        yield drawn(SPECS, ranks, random)


def pairs(schedule: Sequence[float]) -> list[tuple[float, float]]:
    """Rates of two groups: the second one's are ten times as large, and change more slowly."""
    return [(rate, 10 * math.sqrt(rate)) for rate in schedule]


def gap(job: Followed) -> float:
    """By how much updates and what is owed miss the sum of lr * mean gradient, at most."""
    sums = {name: np.zeros(n) for name, n in SIZES.items()}
    schedule = pairs(SCHEDULE)
    for rates, gradients in zip(schedule, gradients_of(len(schedule)), strict=True):
        (exchanged, *_) = job.step(rates, [dict(one) for one in gradients])
        for name, rate in job.now().items():
            mean = np.mean([one[name].astype(np.float64) for one in gradients], 0)
            sums[name] += rate * (mean - exchanged[name])
    return max(
        float(abs(sums[name] - rate * job.owed()[name]).max()) / max(1.0, abs(sums[name]).max())
        for name, rate in job.now().items()
    )


@pytest.mark.one_in(5)
@each_backend
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("values", ["float32", "int8"])
def test_updates_and_what_is_owed_are_all_gradients_at_their_rates(
    backend: Backend, exchange: str, values: str
) -> None:
    plan = plan_of(exchange=exchange, values=values)
    assert gap(Followed(plan, backend)) < 2e-5
    assert gap(Followed(plan, backend, update_rule=False)) > 0.1


@pytest.mark.one_in(2)
@each_backend
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_where_everything_is_sent_nothing_changes(backend: Backend, exchange: str) -> None:
    momentum = 0.0 if exchange == "hierarchical" else 0.9
    plan = plan_of(ratio=1.0, exchange=exchange, momentum=momentum)
    followed, plain = Followed(plan, backend), Followed(plan, backend, update_rule=False)
    for rates, gradients in zip(pairs(SCHEDULE), gradients_of(len(SCHEDULE)), strict=True):
        assert same_bits(followed.step(rates, gradients), plain.step(rates, gradients))


def test_velocities_stay_as_they_are() -> None:
    job = Followed(plan_of(momentum=0.9))
    for gradients in gradients_of(3):
        job.step((1.0, 1.0), gradients)
    owed, velocity = first_of(job, "residuals"), first_of(job, "velocity")
    job.rates = [4.0, 1.0]
    (gradients,) = gradients_of(1)
    job.world.exchange(gradients)
    job.world.rollback()
    assert same_bits([first_of(job, "velocity")], [velocity])
    assert same_bits([first_of(job, "residuals")], [{**owed, "body": owed["body"] / 4}])


def first_of(job: Followed, part: str) -> Gradients:
    """Of rank 0."""
    state = job.world.ranks[0].state_dict()
    residuals = state["residuals"] if part == "residuals" else state[part]["residuals"]
    return {name: job.world.backend.numpy(e) for name, e in residuals.items()}


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_step_that_does_not_count_is_rescaled_for_once(exchange: str) -> None:
    """It leaves the same pair of residuals and rates, to the bit, however often it is tried."""
    job = Followed(plan_of(exchange=exchange))
    first, second, third = gradients_of(3)
    job.step((1.0, 1.0), first)
    job.rates = [0.3, 0.3]
    seen = []
    for spoiled in (False, True, True):
        gradients = [{n: g * np.nan for n, g in one.items()} for one in second]
        job.world.exchange(gradients if spoiled else second)
        assert not any(job.world.commit()) if spoiled else job.world.rollback() is None
        seen.append((*job.world.residuals(), *job.world.owned()))
    assert same_bits(seen[0], seen[1])
    assert same_bits(seen[0], seen[2])
    never = Followed(plan_of(exchange=exchange))
    never.step((1.0, 1.0), first)
    assert same_bits(job.step((0.3, 0.3), third), never.step((0.3, 0.3), third))


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_resumed_job_is_the_one_that_never_stopped(exchange: str) -> None:
    plan = plan_of(exchange=exchange)
    job, again = Followed(plan), Followed(plan)
    steps = list(zip(pairs(SCHEDULE), gradients_of(len(SCHEDULE)), strict=True))
    for rates, gradients in steps[:5]:
        job.step(rates, gradients)
    again.world.load(job.world)
    for rates, gradients in steps[5:]:
        assert same_bits(job.step(rates, gradients), again.step(rates, gradients))
    assert same_bits(job.world.residuals(), again.world.residuals())


@pytest.mark.parametrize("rate", [SMALLEST / 2, 5e-324, 0.2])
def test_units_fall_once_in_a_committed_step(rate: float) -> None:
    present = [0.4]
    rates = Rates(lambda: {"w": present[0]})
    rates.rescalings(0)
    present[0] = rate
    for step in (1, 2):
        before = rates.units["w"]
        assert rates.rescalings(step) == {"w": pytest.approx(1 / FALL)}
        for _ in range(2):  # steps that do not count
            assert rates.rescalings(step) == {}
        assert rates.units["w"] == pytest.approx(FALL * before)


@pytest.mark.parametrize(
    ("settings", "fall"),
    [
        ({"ratio": 0.02}, 0.95),
        ({"ratio": 0.5}, 0.95),
        ({"ratio": 0.004}, 0.99),
        ({"exchange": "sharded", "gather_ratio": 0.004}, 0.99),
        ({"ratios": {"w": 0.002}}, 0.995),
        ({"ratio": 0.004, "ratios": {"w": "dense"}}, 0.95),
    ],
)
def test_units_fall_no_faster_than_elements_leave(settings: Any, fall: float) -> None:
    plan = make_plan([TensorSpec("w", (4000,), "float32")], TopK(**settings))
    assert fall_of(plan.config, "w") == pytest.approx(fall)


def test_what_is_exchanged_stays_bounded_while_a_rate_is_tiny() -> None:
    """However long: a residual that grows faster than it is sent would not."""
    plan = plan_of(ratio=0.004)
    tiny, usual = Followed(plan, ranks=2), Followed(plan, ranks=2)
    for each in tiny.world.ranks:
        each.rates = Rates(tiny.now, partial(fall_of, plan.config))
    norms = list[tuple[float, ...]]()
    for step, gradients in enumerate(gradients_of(100, ranks=2)):
        jobs = ((tiny, 1e-9 if step else 1.0), (usual, 1.0))
        exchanged = [job.step((rate, rate), gradients)[0]["body"] for job, rate in jobs]
        norms.append(tuple(float(np.linalg.norm(each)) for each in exchanged))
    most, usually = np.array(norms).max(axis=0)
    assert most < 5.0 * usually


def test_a_rate_is_told_as_a_share_of_the_largest_so_far() -> None:
    present = [0.1]
    rates = Rates(lambda: {"w": present[0]})
    assert rates.decay("w") == 1.0
    shares = []
    for step, present[0] in enumerate((0.1, 0.4, 0.39, 1e-9, 0.39)):
        rates.rescalings(step)
        shares.append(rates.decay("w"))
    assert shares == pytest.approx([1.0, 1.0, 0.975, FALL * 0.975, 0.975])
    again = Rates(lambda: {"w": present[0]})
    again.load(rates.saved())
    assert (again.rescalings(5), again.decay("w")) == ({}, rates.decay("w"))
    again.load({"rates": {"w": 0.2}})  # as earlier versions saved it
    assert again.decay("w") == 1.0


def test_ranks_of_other_rates_are_told_apart() -> None:
    """Their weights would go apart, with and without compression."""
    job = Followed(plan_of())
    job.world.ranks[1].rates = Rates(lambda: dict.fromkeys(SIZES, 0.7))
    (gradients,) = gradients_of(1)
    with pytest.raises(PlanMismatchError, match=r"learning rates: one on ranks? .*, one on rank 1"):
        job.step((0.5, 0.5), gradients)


def test_what_is_forgotten_is_in_units_of_no_rate() -> None:
    job = Followed(plan_of())
    (gradients,) = gradients_of(1)
    job.step((0.5, 0.5), gradients)
    job.world.ranks[0].reset()
    state = job.world.ranks[0].state_dict()
    assert state["rates"] == {}
    assert state["largest_rates"] == dict.fromkeys(SIZES, 0.5)


def test_state_dicts_without_rates_are_in_units_of_the_next() -> None:
    plain, followed = Followed(plan_of(), update_rule=False), Followed(plan_of())
    first, second = gradients_of(2)
    plain.step((0.5, 0.5), first)
    followed.step((0.1, 0.1), second)
    for one, other in zip(plain.world.ranks, followed.world.ranks, strict=True):
        assert "rates" not in one.state_dict()
        other.load_state_dict(one.state_dict())
    assert same_bits(followed.step((0.2, 0.2), second), plain.step((0.2, 0.2), second))
