"""Which rung a graph takes: the one that `core.schedule` says, at every count of steps."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from horovod_topk.config import TopKConfig
from horovod_topk.core.schedule import Schedule
from horovod_topk.errors import ConfigError
from horovod_topk.tensorflow.rungs import Rungs

WARM = TopKConfig(ratio=0.05, warmup=((2, 0.5), (4, 0.2), (5, 1.0)))


def stepper(rungs: Rungs) -> Any:
    """A step as a graph: its ratio; it is committed."""

    def step() -> Any:
        def build(ratio: float) -> Any:
            for variable, value in rungs.counted():
                variable.assign(value)
            return tf.constant(ratio, tf.float64)

        return rungs.traced(build)

    return tf.function(step, autograph=False)


def test_a_graph_takes_the_ratios_of_the_schedule() -> None:
    rungs, schedule = Rungs(WARM), Schedule(WARM)
    step = stepper(rungs)
    for committed in range(7):
        assert (rungs.committed, rungs.ratio) == (committed, schedule.ratio_at(committed))
        assert step().numpy() == schedule.ratio_at(committed)
    assert step.experimental_get_tracing_count() == 1
    rungs.go_on_from(3)
    assert rungs.ratio == step().numpy() == 0.2


def test_a_graph_takes_what_was_asked_for() -> None:
    rungs = Rungs(WARM)
    step = stepper(rungs)
    for ratio in (1.0, 0.05, 0.2, 0.5):
        rungs.ask(ratio)
        assert rungs.ratio == step().numpy() == ratio
    rungs.ask(None)
    assert (rungs.committed, rungs.ratio) == (4, 1.0)
    assert step().numpy() == 1.0


def test_without_warm_up_a_graph_has_one_rung_unless_someone_asks_before() -> None:
    rungs = Rungs(TopKConfig(ratio=0.1))
    assert stepper(rungs)().numpy() == 0.1
    assert rungs.committed is None
    with pytest.raises(ConfigError, match=r"traced for ratio 0\.1 alone\. Call set_ratio\(None\)"):
        rungs.ask(1.0)
    early = Rungs(TopKConfig(ratio=0.1))
    early.ask(None)
    step = stepper(early)
    assert step().numpy() == 0.1
    early.ask(1.0)
    assert step().numpy() == 1.0


def test_what_is_no_rung_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rungs = Rungs(WARM)
    with pytest.raises(ConfigError, match=r"ratio 0\.3 is none"):
        rungs.ask(0.3)
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    with pytest.raises(ConfigError, match="elastic job do not hear"):
        rungs.ask(1.0)
    assert rungs.ratio == 0.5


def test_variables_can_be_made_while_a_graph_is_built() -> None:
    made = []

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def step() -> Any:
        made.append(Rungs(WARM))
        return tf.constant(0)

    step()
    assert made[0].ratio == 0.5
