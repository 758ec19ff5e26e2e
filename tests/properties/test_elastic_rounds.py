"""Methods of rounds in elastic jobs: ranks join, leave and are lost, and all go on alike."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from oracle import elastic
from oracle.backends import NUMPY, TORCH, Backend
from oracle.elastic import PATIENCE, Member
from oracle.loopback import Loopback
from oracle.schedules import ByGradient
from oracle.two_rounds import TwoRounds

from horovod_topk.core.codec.codec import PayloadCodec
from horovod_topk.core.control.schedule import Clock
from horovod_topk.core.exchange.selection import make_exchange
from horovod_topk.core.plan.buckets import TensorSpec, make_plan
from horovod_topk.core.run.attached import Attached
from horovod_topk.core.run.runner import StepRunner
from horovod_topk.core.state.learning_rates import Rates
from horovod_topk.elastic import Manager
from horovod_topk.methods import METHODS
from horovod_topk.methods.protocol import Method
from horovod_topk.methods.topk import TopK
from horovod_topk.updates.tracker import ADAM, SGD, AdamFollower, Rule, Tracker

SPECS = [TensorSpec("w", (40, 24), "float32"), TensorSpec("v", (30,), "float32")]
ROWS: list[Method] = [
    METHODS[name](exchange=exchange, min_numel=64, **settings)  # type: ignore[arg-type]
    for name, settings in (("PowerSGD", {"rank": 2}), ("RandomK", {"ratio": 0.1}))
    for exchange in ("reduce", "allgather", "allreduce")
]
FOLLOWS = TopK(0.1, min_numel=64)
OF_SGD = TopK(0.1, min_numel=64, follow_lr=True)
each_method = pytest.mark.parametrize(
    "method", ROWS, ids=lambda method: f"{type(method).__name__}-{method.exchange}"
)


class Place:
    """A rank's collective, whose network and number change when ranks meet again.

    After `waits` more waits, collectives fail as Horovod's do where a rank is lost.
    """

    network: Loopback[Any]
    rank: int
    waits = math.inf

    @property
    def size(self) -> int:
        return self.network.size

    def __getattr__(self, verb: str) -> Any:
        start = getattr(self.network.collective(self.rank), verb)
        return lambda *arguments: _Fallible(self, start(*arguments))


@dataclass
class _Fallible:
    place: Place
    pending: Any

    def wait(self) -> Any:
        if self.place.waits < 1:
            raise RuntimeError("a rank is lost")
        self.place.waits -= 1
        return self.pending.wait()


class Rank(Member, Attached[StepRunner[Any]]):
    """One process: a real compressor and its manager."""

    rate = 0.1  # learning rate

    def __init__(
        self, method: Method, backend: Backend, commit_dir: Path | None, rule: Rule | None
    ) -> None:
        super().__init__(None, "average", "rank", "not in a job")
        self.rule = rule
        self.active, self.framework = True, backend.name
        self.backend, self.place_of = backend, Place()
        self.method = method
        self.manager = Manager(lambda: [self], self, "rounds", commit_dir)  # type: ignore[list-item]

    def begin(self) -> None:
        """As an optimizer that is constructed, which no other rank waits for."""
        place, ops = self.place_of, self.backend.ops
        plan = make_plan(SPECS, self.method, update_rule=self.rule)
        follower = None if self.rule is None else Tracker(self.rule, ops)
        exchange = make_exchange(self.method.exchange, place, in_rounds=self.method.in_rounds)
        self._state = StepRunner(plan, ops, PayloadCodec(ops), exchange, "job", followers=follower)
        if self.method.follow_lr:
            self._state.rates = Rates(lambda: {spec.name: self.rate for spec in SPECS})
        assert self.manager is not None
        self.manager.save()  # type: ignore[attr-defined]

    # What it has.

    def array(self, part: str, name: str = "w") -> NDArray[Any]:
        return self.backend.numpy(self._state.parts[part].residual(name))

    def step(self, gradients: dict[str, Any]) -> list[bytes]:
        """One step on this rank; what it applies."""
        arrays = [self.backend.array(gradients[s.name], s.dtype) for s in SPECS]
        self._state.launch(0, arrays)
        self._state.step.finish({0: arrays})
        assert self._state.commit()
        return [self.backend.numpy(array).tobytes() for array in arrays]


class Job(elastic.Job):
    """Ranks that exchange by a method."""

    def __init__(
        self,
        method: Method,
        size: int,
        backend: Backend = TORCH,
        commit_dir: Path | None = None,
        rule: Rule | None = None,
    ) -> None:
        self.random = np.random.default_rng(0)
        own = method, backend, commit_dir, rule
        super().__init__(lambda: Rank(*own), size, self.connect)

    @staticmethod
    def connect(ranks: list[Rank], new: list[Rank]) -> None:
        network: Loopback[Any] = Loopback(len(ranks), ranks[0].backend.ops, PATIENCE)
        for place, rank in enumerate(ranks):
            rank.place_of.network, rank.place_of.rank = network, place
            rank.place_of.waits = math.inf
        for rank in new:
            rank.begin()

    def steps(self, count: int) -> list[list[bytes]]:
        """Make some steps; all ranks apply the same, and have the same shared state."""
        applied = []
        for _ in range(count):
            drawn = {
                rank: {s.name: self.random.standard_normal(s.shape, "f4") for s in SPECS}
                for rank in self.ranks
            }
            found = self.together(partial(_step, drawn))
            assert all(each == found[0] for each in found)
            applied.append(found[0])
        self.assert_alike()
        return applied

    def assert_alike(self) -> None:
        clocks = {rank.clock for rank in self.ranks}
        assert len(clocks) == 1
        if "q" in self.ranks[0]._state.states:
            assert len({rank.array("state.q").tobytes() for rank in self.ranks}) == 1

    def mass(self) -> NDArray[Any]:
        return np.mean([rank.array("residuals") for rank in self.ranks], 0, dtype="f8")


def _step(gradients: dict[Rank, dict[str, Any]], rank: Rank) -> list[bytes]:
    return rank.step(gradients[rank])


@pytest.mark.one_in(2)
@each_method
def test_ranks_join_and_leave_and_all_apply_the_same(method: Method) -> None:
    job = Job(method, 2)
    job.steps(2)
    before = job.mass()
    job.meet(joining=1)
    np.testing.assert_allclose(job.mass(), before, atol=1e-6)
    assert not job.ranks[2].array("residuals").any()
    job.assert_alike()
    job.steps(2)
    before = job.mass()
    job.leave([0], joining=2)
    np.testing.assert_allclose(job.mass(), before, atol=1e-6)
    job.steps(2)
    job.leave([2, 3])
    job.steps(1)


@pytest.mark.one_in(2)
@each_method
def test_a_lost_rank_is_replaced(method: Method, tmp_path: Path) -> None:
    job = Job(method, 3, commit_dir=tmp_path)
    job.steps(2)
    job.commit()
    before = job.mass()
    job.steps(1)
    job.lose([1], joining=1)  # as many ranks as before, and other numbers
    np.testing.assert_allclose(job.mass(), before, atol=1e-6)
    assert {rank.stats().lost_ranks for rank in job.ranks} == {0}
    assert job.ranks[0].clock == Clock(2)
    job.assert_alike()
    job.steps(2)
    job.commit()
    job.lose([0])
    job.steps(2)


@pytest.mark.one_in(2)
@each_method
def test_a_collective_may_fail_at_any_time(method: Method, tmp_path: Path) -> None:
    waits = method.rounds * (1 + (method.exchange == "reduce"))  # type: ignore[attr-defined]
    job = Job(method, 3, commit_dir=tmp_path)
    for succeed in range(waits):
        job.steps(1)
        job.commit()
        before = job.mass()
        for rank in job.ranks:
            rank.place_of.waits = succeed
        with pytest.raises(RuntimeError, match="a rank is lost"):
            job.steps(1)
        job.lose([2], joining=1)
        np.testing.assert_allclose(job.mass(), before, atol=1e-6)
        job.assert_alike()
    job.steps(1)


@pytest.mark.parametrize("name", ["PowerSGD", "RandomK"])
def test_owners_and_every_rank_add_up_to_the_same_bits_after_a_change(name: str) -> None:
    """A changed job goes on bitwise alike by both exchanges whose order is fixed."""
    applied = []
    for method in (each for each in ROWS if type(each).__name__ == name):
        if method.exchange != "allreduce":
            job = Job(method, 2, NUMPY)
            job.steps(1)
            job.meet(joining=2)
            applied.append(job.steps(2))
    assert applied[0] == applied[1]


def test_a_rank_that_went_back_to_another_commit_takes_the_others_state() -> None:
    job = Job(ROWS[0], 3)
    job.steps(1)
    job.commit()
    job.steps(1)
    for rank in job.ranks[:2]:
        rank.manager.save()
    for rank in job.ranks:
        rank.manager.restore()
    assert job.ranks[2].array("state.q").any()
    assert (job.ranks[2].array("state.q") != job.ranks[0].array("state.q")).any()
    job.meet()
    assert not job.ranks[2].array("residuals").any()
    job.assert_alike()
    job.steps(1)


def test_measures_are_those_of_the_ranks_that_are_there() -> None:
    """An allreduce has a lane for each rank."""
    method = replace(ROWS[-1], schedule=ByGradient())
    assert method.exchange == "allreduce"
    job = Job(method, 2)
    for change in ({}, {"joining": 2}, {"gone": [0]}):
        job.meet(**change)  # type: ignore[arg-type]
        job.steps(2)
        heard = [rank._state.arrived[0] for rank in job.ranks]
        assert len(heard[0]) == len(job.ranks)
        assert all(each == heard[0] for each in heard)


def test_a_ranks_own_state_is_not_shared() -> None:
    job = Job(TwoRounds(columns=24), 2)
    job.steps(1)
    job.meet(joining=1)
    assert [rank.array("state.steps").tolist() for rank in job.ranks] == [[1.0], [1.0], [0.0]]
    job.steps(1)


def test_steps_of_ranks_that_join_are_those_of_the_others() -> None:
    job, sign = Job(FOLLOWS, 2, rule=ADAM), itertools.cycle([-1.0, 1.0])
    drawn = {s.name: job.random.standard_normal(s.shape, "f4") for s in SPECS}

    def step(rank: Rank) -> list[bytes]:
        rank.step({name: swing * each for name, each in drawn.items()})
        for follower, committed in rank._state.step.followers():
            assert isinstance(follower, AdamFollower)
            found = [follower.damping(committed=committed), *follower.codes]
            return [rank.backend.numpy(x).tobytes() for x in found]
        raise AssertionError

    for count in range(12):
        if count == 6:
            job.leave([], joining=1)
        swing = next(sign)
        first, *others = job.together(step)
        assert all(other == first for other in others)
    assert job.together(lambda rank: rank._state.stats().step_factor)[0] < 0.9


@pytest.mark.parametrize("rates", [(0.1, 0.05, 0.05), (0.1, 0.05, 0.01), (0.1, 0.1, 0.2)])
def test_ranks_that_join_have_the_learning_rates_of_the_others(
    rates: tuple[float, float, float],
) -> None:
    """The learning rate may change before the job grows, and in the step in which it grows."""
    job = Job(OF_SGD, 2, rule=SGD)

    def step(rank: Rank) -> list[object]:
        rank.rate = rates[(count > 3) + (count > 5)]
        rank.step(drawn)
        decays = [rank._state.decay(spec.name) for spec in SPECS]
        return [decays, *(rank.array(f"state.{name}").tolist() for name in ("norms", "factors"))]

    for count in range(12):
        if count == 6:
            job.leave([], joining=1)
        drawn = {s.name: job.random.standard_normal(s.shape, "f4") for s in SPECS}
        first, *others = job.together(step)
        assert all(other == first for other in others)
