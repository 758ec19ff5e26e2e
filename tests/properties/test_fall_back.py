"""A fall-back loses no residual, happens on all ranks at once, and ends in dense steps."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from oracle.backends import NUMPY, Backend, each_backend
from oracle.schedules import ByGradient
from oracle.two_rounds import TwoRounds
from oracle.world import SPECS, Gradients, World, gradients, same_bits

from horovod_topk.core.control.guard import COMMON, COMPRESSING, DENSE, FLUSHING, VERDICT
from horovod_topk.core.plan.buckets import TensorSpec, make_plan
from horovod_topk.errors import ConfigError
from horovod_topk.guard import Guard
from horovod_topk.methods.dense import Dense
from horovod_topk.methods.powersgd import PowerSGD
from horovod_topk.methods.protocol import Method
from horovod_topk.methods.qsgd import QSGD
from horovod_topk.methods.randomk import RandomK
from horovod_topk.methods.signsgd import SignSGD
from horovod_topk.methods.terngrad import TernGrad
from horovod_topk.methods.threshold import Threshold
from horovod_topk.methods.topk import TopK

STORM = Guard(nonfinite=2)
TOPK = TopK(0.05, min_numel=0, guard=STORM)
METHODS: dict[str, Method] = {
    "allgather": TOPK,
    "sharded": replace(TOPK, exchange="sharded"),
    "hierarchical": replace(TOPK, exchange="hierarchical"),
    "reduce": TwoRounds(guard=STORM),
    "threshold": Threshold(min_numel=0, guard=STORM),
    "randomk": RandomK(ratio=0.05, min_numel=0, guard=STORM),
    "sign": SignSGD(min_numel=0, guard=STORM),
    "qsgd": QSGD(min_numel=0, guard=STORM),
    "terngrad": TernGrad(min_numel=0, guard=STORM),
    "powersgd": PowerSGD(min_numel=0, guard=STORM),
    "scheduled": replace(TOPK, schedule=ByGradient()),
}


def world(method: Method, ranks: int = 4, backend: Backend = NUMPY) -> World:
    """Simulated ranks with a plan of two buckets."""
    return World(make_plan(SPECS, method), ranks, backend)


def with_a_nan(ranks: int) -> list[Gradients]:
    """Gradients of all ranks, with a NaN on the last rank."""
    made = gradients(ranks)
    made[-1]["b"][3] = np.nan
    return made


def take(job: World, given: list[Gradients]) -> list[Gradients]:
    exchanged = job.exchange(given)
    job.commit()
    return exchanged


def storm(job: World) -> None:
    """Take three steps, and two more with a NaN."""
    for step in range(3):
        take(job, gradients(job.size, step))
    for _ in range(2):
        take(job, with_a_nan(job.size))


def stages(job: World) -> set[float]:
    return {rank.guard.memory.stage for rank in job.ranks}


@pytest.mark.parametrize("kind", METHODS)
def test_the_first_dense_step_sends_all_residuals_and_later_ones_gradients(kind: str) -> None:
    job = world(METHODS[kind])
    storm(job)
    assert stages(job) == {FLUSHING}
    kept, owned, given = job.residuals(), job.owned(), gradients(4, 7)
    exchanged = take(job, given)
    assert stages(job) == {DENSE}
    for name in "ab":  # owners' residuals are shards: compare sums
        ours = sum(float(each[name].sum(dtype=np.float64)) for each in (*given, *kept))
        theirs = sum(float(each[name].sum(dtype=np.float64)) for each in owned)
        expected = ours / 4 + theirs / (4 if kind == "hierarchical" else 1)  # of sums, or means
        found = float(exchanged[0][name].sum(dtype=np.float64))
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-4)
        if not owned:
            whole = sum(np.ravel(each[name]).astype(np.float64) for each in (*given, *kept)) / 4
            np.testing.assert_allclose(np.ravel(exchanged[0][name]), whole, rtol=1e-5, atol=1e-5)
    assert not any(e.any() for one in (*job.residuals(), *job.owned()) for e in one.values())
    dense = world(Dense())
    for step in range(8, 11):
        given = gradients(4, step)
        found = take(job, given)
        for ours, theirs in zip(found, take(dense, given), strict=True):
            for name in "ab":
                np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-6, atol=1e-7)
        assert same_bits(found, [found[0]] * 4)
    assert [rank.guard.fallbacks for rank in job.ranks] == [{"non-finite": 1}] * 4


@each_backend
@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
def test_at_two_ranks_later_steps_are_those_of_dense_to_the_bit(
    backend: Backend, exchange: str
) -> None:
    job, dense = world(replace(TOPK, exchange=exchange), 2, backend), world(Dense(), 2, backend)
    storm(job)
    take(job, gradients(2, 7))
    for step in range(8, 11):
        given = gradients(2, step)
        assert same_bits(take(job, given), take(dense, given))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", METHODS)
def test_reports_of_some_ranks_decide_for_all(kind: str) -> None:
    job = world(METHODS[kind])
    reported = [[1.0 + 0.1 * (step % 2) for step in range(20)] for _ in range(4)]
    reported[0] += [300.0] * 40  # rank 0 is an owner with every exchange
    fell = list[Any]()
    for rank in job.ranks:
        rank.on_step(lambda counters: fell.append(counters.fell_back))
    for step in range(60):
        take(job, gradients(4, step))
        for rank, values in zip(job.ranks, reported, strict=True):
            if step < len(values):
                rank.guard.report(values[step])
        assert len({rank.guard.memory[: len(COMMON)] for rank in job.ranks}) == 1
    assert [each for each in fell if each] == ["trend"] * 4
    assert stages(job) == {DENSE}
    assert {rank.guard.warnings for rank in job.ranks} == {job.ranks[0].guard.warnings}


def test_the_bytes_of_a_report_and_a_verdict() -> None:
    silent, telling = world(replace(TOPK, guard=None), 2), world(TOPK, 2)
    for job in (silent, telling):
        job.step(gradients(2))
    (_, plain), (_, told) = (each.payloads(0)[0] for each in (silent, telling))
    assert len(plain) == len(told)  # the measure fits into the padding before the body
    assert told[28:32].rstrip(b"\0") == plain[24:32].rstrip(b"\0")
    telling.ranks[0].guard.report(0.3)
    for _ in range(2):
        telling.ranks[1].guard.report(math.nan)
    telling.step(gradients(2, 1))
    last = [dict(telling.payloads(rank))["job.0.0"][24:28] for rank in range(2)]
    numbers = [float(np.float32(each)) for each in (0.3, VERDICT)]
    assert last == [np.float32(each).tobytes() for each in numbers]
    heard = [rank.arrived for rank in telling.ranks]
    assert heard == [{0: [(numbers[0],), (numbers[1],)], 1: [(0.0,), (0.0,)]}] * 2


def test_dense_gradients_of_many_ranks_are_not_gathered() -> None:
    specs = [TensorSpec("w", (300, 300), "float32")]
    job = World(make_plan(specs, TOPK), 8, NUMPY)
    given = [{"w": np.full((300, 300), float(rank), np.float32)} for rank in range(8)]
    for rank in job.ranks:
        rank.guard.memory = rank.guard.memory._replace(stage=float(FLUSHING))
    assert (take(job, given)[5]["w"] == 3.5).all()
    traffic = job.ranks[0].traffic()
    assert traffic.dense_bytes < traffic.sent_bytes < 1.02 * traffic.dense_bytes
    for rank in job.ranks:
        rank.guard.resume((), own=True)
    take(job, given)
    assert job.ranks[0].traffic().sent_bytes < 0.5 * traffic.sent_bytes
    assert {rank.exchange.kind for rank in job.ranks} == {"allgather"}


@pytest.mark.parametrize("saved_at", [4, 5, 6])
def test_it_goes_on_where_a_state_dict_left_it(saved_at: int) -> None:
    settings = replace(TOPK, exchange="sharded", guard=replace(STORM, cool_down=2))
    unbroken, resumed = world(settings), world(settings)
    for step in range(12):
        if step == saved_at:
            resumed.load(unbroken)
            assert [new.clock for new in resumed.ranks] == [old.clock for old in unbroken.ranks]
        given = with_a_nan(4) if step in (3, 4) else gradients(4, step)
        exchanged = take(unbroken, given)
        if step >= saved_at:
            assert same_bits(take(resumed, given), exchanged)
        for job in (unbroken, resumed):
            for rank in job.ranks:
                rank.guard.report(1.0 + 0.1 * step)
    assert same_bits(resumed.residuals(), unbroken.residuals())
    known = [[rank.guard.memory for rank in job.ranks] for job in (unbroken, resumed)]
    assert known[0] == known[1]
    assert known[0][0].reports > 0
    assert stages(unbroken) == stages(resumed) == {COMPRESSING}


def test_a_rank_that_joins_learns_of_it() -> None:
    job, joined = world(TOPK), world(TOPK)
    storm(job)
    joined.ranks[0].resume(job.ranks[3].clock, 4)
    assert joined.ranks[0].guard.memory == job.ranks[3].guard.memory
    assert joined.ranks[0].ratio == 1.0


def test_a_step_that_was_cut_off_counts_for_nothing() -> None:
    job = world(TOPK, 2)
    for _ in range(3):
        given = with_a_nan(2)
        given[1]["a"][0, 0] = np.nan
        job.launch(given)
        for rank in job.ranks:
            rank.step.finish({0: [np.zeros((40, 32), np.float32)]})
        for rank in job.ranks:
            rank.abandon()
    assert {rank.rolled_back for rank in job.ranks} == {3}
    assert stages(job) == {COMPRESSING}


@pytest.mark.parametrize(
    "make",
    [
        lambda: World(make_plan(SPECS, TopK(1.0, guard=Guard())), 2, NUMPY),
        lambda: World(make_plan(SPECS, Dense(values="float16", guard=Guard())), 2, NUMPY),
    ],
)
def test_a_guard_of_what_sends_everything_is_refused(make: Any) -> None:
    with pytest.raises(ConfigError, match="nothing denser to fall back to"):
        make()


def test_a_user_cannot_go_on_compressing_by_chance() -> None:
    job = world(TOPK, 2)
    job.set_ratio(0.05)
    storm(job)
    assert {rank.ratio for rank in job.ranks} == {1.0}


def test_trials_are_dense_and_time_both(monkeypatch: pytest.MonkeyPatch) -> None:
    job = world(replace(TOPK, guard=Guard(slower=1.5, trial_every=12)), 2)
    levels, spent = [], {0.05: 0.2, 1.0: 0.1}
    for rank in job.ranks:
        monkeypatch.setattr(rank.guard, "time", timed(rank.guard, rank, spent))
    for step in range(26):
        take(job, gradients(2, step))
        levels.append(job.ranks[0].plan.config.ratio)
    assert levels == [*[0.05] * 9, *[1.0] * 3, *[0.05] * 9, *[1.0] * 3, 0.05, 1.0]
    assert job.ranks[0].guard.fallbacks == {"slower": 1}


def timed(guard: Any, rank: Any, spent: dict[float, float]) -> Any:
    """The guard's `time`, called with seconds that depend on the level alone."""
    time = guard.time
    return lambda seconds, committed: time(spent[rank.plan.config.ratio], committed)
