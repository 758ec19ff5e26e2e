"""Which ratio level a graph takes: the one that `core.schedule` says, at every count of steps."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import tensorflow as tf
from oracle.loopback import Loopback

from horovod_topk.core.control.schedule import Schedule
from horovod_topk.core.plan import facts
from horovod_topk.core.run.state import State
from horovod_topk.core.run.timing import Seconds
from horovod_topk.errors import ConfigError
from horovod_topk.methods import QSGD
from horovod_topk.methods.topk import TopK
from horovod_topk.ops.tensorflow import TensorFlowOps
from horovod_topk.tensorflow.collective import _seconds
from horovod_topk.tensorflow.state_variables import _rank_in_graph
from horovod_topk.tensorflow.traced_schedule import TracedSchedule

WARM = TopK(ratio=0.05, warmup=((2, 0.5), (4, 0.2), (5, 1.0)))


def state_of(config: TopK) -> tuple[State[Any], TracedSchedule]:
    """A state whose counts lie in variables."""
    traced = TracedSchedule(config)
    return State(config, "average", TensorFlowOps(), traced), traced


def stepper(traced: TracedSchedule) -> Any:
    """A step as a graph: its ratio; it is committed."""

    def step() -> Any:
        def build(ratio: float) -> Any:
            traced.count()
            return tf.constant(ratio, tf.float64)

        return traced.traced(build)

    return tf.function(step, autograph=False)


def test_a_graph_takes_the_ratios_of_the_schedule() -> None:
    (state, traced), schedule = state_of(WARM), Schedule(WARM)
    step = stepper(traced)
    for committed in range(7):
        assert (traced.committed, state.ratio) == (committed, schedule.ratio_at(committed))
        assert step().numpy() == schedule.ratio_at(committed)
    assert step.experimental_get_tracing_count() == 1
    state.resume((3, None))
    assert state.ratio == step().numpy() == 0.2


def test_a_graph_takes_what_was_asked_for() -> None:
    state, traced = state_of(WARM)
    step = stepper(traced)
    for ratio in (1.0, 0.05, 0.2, 0.5):
        state.set_ratio(ratio)
        assert state.ratio == step().numpy() == ratio
    state.set_ratio(None)
    assert (traced.committed, state.ratio) == (4, 1.0)
    assert step().numpy() == 1.0


def test_without_warm_up_a_graph_has_one_level_unless_someone_asks_before() -> None:
    state, traced = state_of(TopK(ratio=0.1))
    assert stepper(traced)().numpy() == 0.1
    assert traced.committed == 1
    with pytest.raises(ConfigError, match=r"traced for ratio 0\.1 alone\. Call set_ratio\(None\)"):
        state.set_ratio(1.0)
    early, traced = state_of(TopK(ratio=0.1))
    early.set_ratio(None)
    step = stepper(traced)
    assert step().numpy() == 0.1
    early.set_ratio(1.0)
    assert step().numpy() == 1.0


def test_what_is_no_level_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    state, _ = state_of(WARM)
    with pytest.raises(ConfigError, match=r"ratio 0\.3 is none"):
        state.set_ratio(0.3)
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    with pytest.raises(ConfigError, match="elastic job do not hear"):
        state.set_ratio(1.0)
    assert state.ratio == 0.5


def test_a_graph_of_an_elastic_job_has_no_random_numbers_of_its_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collective = Loopback(2, TensorFlowOps()).collective(1)
    assert _rank_in_graph(QSGD(), collective) == 1
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    with pytest.raises(ConfigError, match="QSGD draws random numbers by the rank that a graph"):
        _rank_in_graph(QSGD(), collective)


def test_variables_can_be_made_while_a_graph_is_built() -> None:
    made = []

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def step() -> Any:
        made.append(state_of(WARM)[0])
        return tf.constant(0)

    step()
    assert made[0].ratio == 0.5


@pytest.mark.parametrize("rate", [None, 0.05])
def test_facts_of_a_graph_are_those_of_the_host(rate: float | None) -> None:
    _, traced = state_of(WARM)
    traced.committed, traced.lineage, traced.asked = 70_000, 2**31 - 3, 0.2
    rates = 0 if rate is None else struct.unpack("<q", struct.pack("<d", rate))[0] % facts.PRIME
    asked = Schedule(WARM).levels.index(0.2)
    state, below = facts.with_ratio(2**31 - 3 + 7, asked), Schedule(WARM).below_usual(0.5)
    expected = facts.pack(70_000, below, state, rates).to_bytes(4, "little")
    known = None if rate is None else tf.constant(rate, tf.float64)
    assert bytes(traced.facts(0.5, known, 7).numpy()) == expected


def test_seconds_are_worked_out_of_times() -> None:
    """Two buckets of two collectives, and a third one that sends nothing."""
    starts, ends, ready = [2.0, 3.0, 5.0, 6.0], [4.0, 5.0, 8.0, 9.0], [1.0, 2.5, 7.0]
    found = _seconds(4, [0, 1, 4], [*starts, *ends, *ready, 11.0])
    assert found == Seconds(1.5, 7.0, 2.0, 2.0)
    assert _seconds(0, [0], [1.0, 2.0]) == Seconds()
