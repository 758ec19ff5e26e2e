"""Measures are equal on all ranks, and so are the ratio levels decided from them."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from oracle.backends import NUMPY, Backend, each_backend
from oracle.schedules import ByGradient, Counting
from oracle.two_rounds import TwoRounds
from oracle.world import SPECS, Gradients, World, gradients, same_bits

from horovod_topk.core.control.schedule import Schedule as Levels
from horovod_topk.core.plan.buckets import make_plan
from horovod_topk.errors import ConfigError
from horovod_topk.methods.dense import Dense
from horovod_topk.methods.protocol import Method
from horovod_topk.methods.topk import TopK
from horovod_topk.schedules import Decision, Schedule

METHODS: dict[str, Method] = {
    "allgather": TopK(0.05, min_numel=0),
    "sharded": TopK(0.05, min_numel=0, exchange="sharded"),
    "hierarchical": TopK(0.05, min_numel=0, exchange="hierarchical"),
    "reduce": TwoRounds(),
    "allreduce": Dense(exchange="allreduce"),
}


def world(method: Method, ranks: int = 4, backend: Backend = NUMPY) -> World:
    """Simulated ranks with a plan of two buckets, and a schedule that uses measures."""
    return World(make_plan(SPECS, replace(method, schedule=ByGradient())), ranks, backend)


def squares(one: Gradients, name: str) -> float:
    return float(np.sum(np.square(one[name].astype(np.float64))))


@each_backend
@pytest.mark.parametrize("kind", METHODS)
def test_every_rank_hears_the_same_of_all(backend: Backend, kind: str) -> None:
    job = world(METHODS[kind], backend=backend)
    for step in range(2):
        owed = job.residuals() if job.ranks[0].registry.pieces["a"] else job.owned()
        given = gradients(4, seed=step)
        job.step(given)
        heard = [rank.arrived for rank in job.ranks]
        assert all(each == heard[0] for each in heard)
        for ordinal, name in enumerate(["a", "b"]):
            rows = heard[0][ordinal]
            assert [row[0] for row in rows] == pytest.approx(
                [squares(g, name) for g in given], rel=1e-5
            )
            expected = [squares(e, name) for e in owed] or [0.0] * 4  # an allreduce has no residual
            assert [row[1] for row in rows] == pytest.approx(expected, rel=1e-5)


@each_backend
@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
def test_a_codec_tells_what_it_measures(backend: Backend, exchange: str) -> None:
    method = Counting(exchange=exchange, min_numel=0)
    job = World(make_plan(SPECS, method), 3, backend)
    given = gradients(3)
    job.step(given)
    expected = [[(float(np.sum(abs(g[name]) > 1.0)),) for g in given] for name in ("a", "b")]
    assert [list(job.ranks[1].arrived[i]) for i in range(2)] == expected


@pytest.mark.parametrize("exchange", ["allgather", "sharded", "hierarchical"])
def test_measures_move_payloads_and_change_nothing_else(exchange: str) -> None:
    method = TopK(0.05, min_numel=0, exchange=exchange)
    silent = World(make_plan(SPECS, method), 3, NUMPY)
    telling = World(make_plan(SPECS, replace(method, schedule=ByGradient(limit=1e9))), 3, NUMPY)
    for step in range(3):
        given = gradients(3, seed=step)
        assert same_bits(telling.step(given), silent.step(given))
    assert same_bits(telling.residuals(), silent.residuals())


def test_the_bytes_of_measures() -> None:
    method = TopK(0.05, min_numel=0)
    silent = World(make_plan(SPECS, method), 2, NUMPY)
    telling = world(method, 2)
    (_, plain), (_, told) = (w.payloads(0)[0] for w in (silent, telling) if w.step(gradients(2)))
    assert struct.unpack_from("<H", told, 6) == (8,)
    assert struct.unpack_from("<2f", told, 24) == telling.ranks[0].arrived[0][0]
    assert told[32:].rstrip(b"\0") == plain[24:].rstrip(b"\0")


def test_plans_differ_where_measures_do() -> None:
    class Silent(ByGradient):
        measures = ()

    plans = [
        make_plan(SPECS, TopK(schedule=each))
        for each in (None, ByGradient(), ByGradient(limit=5.0), Silent())
    ]
    assert len({plan.digest for plan in plans}) == 4
    assert len({plan.buckets[0].digest for plan in plans}) == 4


@pytest.mark.parametrize("kind", ["allgather", "sharded", "hierarchical"])
def test_levels_follow_from_what_was_told(kind: str) -> None:
    job, ratios = world(METHODS[kind]), []
    for factor in (0.01, 1.0, np.nan, 0.01, 0.01):
        ratios.append({rank.ratio for rank in job.ranks})
        job.exchange(gradients(4, factor=factor))
        job.commit()
    assert ratios == [{0.05}, {0.05}, {0.25}, {0.25}, {0.05}]
    decisions = {rank.counter.decision for rank in job.ranks}
    assert len(decisions) == 1
    assert decisions.pop()[:2] == (0.05, 4.0)  # the rolled-back step does not count


def test_a_level_may_send_other_values() -> None:
    schedule = ByGradient(profiles={0.25: {"values": "int8"}})
    job = World(make_plan(SPECS, TopK(0.05, values="int4", schedule=schedule)), 2, NUMPY)
    sizes = []
    for _ in range(2):
        job.step(gradients(2))
        sizes.append(job.ranks[0].traffic().payload_bytes)
    assert job.ranks[0].plan.config.agreed()["values"] == "int8"
    assert sizes[1] > 2.5 * sizes[0]


def test_a_user_comes_first_and_then_warm_up() -> None:
    job = world(TopK(0.05, min_numel=0, warmup=((1, 0.5), (3, 0.1))), 2)
    ratios = []
    for step in range(5):
        ratios.append(job.ranks[0].ratio)
        job.step(gradients(2))
        if step == 3:
            job.set_ratio(1.0)
    assert ratios == [0.5, 0.1, 0.1, 0.25, 1.0]


def test_a_level_of_another_job_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    job = world(METHODS["allgather"], 2)
    job.ranks[0].load_state_dict(job.ranks[0].state_dict() | {"decision": [0.125, 1.0]})
    assert job.ranks[0].ratio == 0.05
    assert "level 0.125 is no ratio" in caplog.text


def test_what_is_no_schedule_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not a schedule"):
        TopK(schedule="accordion")  # type: ignore[arg-type]


def test_a_schedule_has_eight_levels_at_most() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Many(Schedule):
        def ratios(self, usual: float) -> tuple[float, ...]:
            return tuple(1 / each for each in range(2, 9))

        def decide(self, *args: Any) -> Decision:
            return ()

    with pytest.raises(ConfigError, match="have 9 ratios"):
        Levels(TopK(0.01, schedule=Many()))
