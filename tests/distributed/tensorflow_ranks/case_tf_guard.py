"""The guard in TensorFlow: in traced graphs, in eager mode, and in Keras' `fit`."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
from kerasses import LIBRARIES, fit
from proof import assert_ranks_equal
from tapes import Run, equal, noise

from horovod_topk import report
from horovod_topk.core.run.stats import StepCounters
from horovod_topk.errors import ConfigError
from horovod_topk.guard import Guard
from plain import PlainTopKEF as TopKEF

SPARSE = {"ratio": 0.05, "min_numel": 0}
STORM = Guard(nonfinite=2, trend=None, residual=None)
WAYS = pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])


def storm(run: Run) -> None:
    """Take three steps, and two more with a NaN on the last rank."""
    for step in range(5):
        spoiled = step > 2 and hvd.rank() == hvd.size() - 1
        run.take(step, np.nan if spoiled else 1.0)


@pytest.mark.one_in(4)
@WAYS
@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
def test_from_there_on_it_is_dense_training_to_the_bit(graph: bool, exchange: str) -> None:
    run = Run(TopKEF(**SPARSE, exchange=exchange, guard=STORM), graph)
    dense, again = Run(hvd.Compression.none, graph), None
    storm(run)
    run.take(5)
    assert [each.fell_back for each in run.seen] == [*[""] * 4, "non-finite", ""]
    assert [each.level for each in run.seen] == [*[0.05] * 5, 1.0]
    again = Run(TopKEF(**SPARSE, exchange=exchange, guard=STORM), graph)
    again.compression.load_state_dict(run.compression.state_dict())
    for step in range(6, 9):
        exchanged = run.take(step)
        assert equal(exchanged, dense.take(step))
        assert equal(exchanged, again.take(step))
    stats = run.compression.stats()
    assert (stats.residual_norm, stats.level, stats.fallbacks) == (0.0, 1.0, {"non-finite": 1})


@pytest.mark.slow
@WAYS
def test_one_rank_whose_loss_rises_takes_all_with_it(graph: bool) -> None:
    run = Run(TopKEF(**SPARSE, guard=Guard(cool_down=3)), graph)
    for step in range(40):
        run.take(step)
        report(np.inf if hvd.rank() == 1 and step >= 30 else 1.0 + 0.1 * (step % 2))
    fell = [each.step for each in run.seen if each.fell_back]
    assert fell[:1] == [36]  # four reports, a step that reads them, one that sends
    assert [each.level for each in run.seen[36:]] == [1.0] * 4
    assert hvd.allgather_object(fell) == [fell] * hvd.size()


def test_momentum_stays_corrected_and_is_that_of_what_is_sent() -> None:
    run = Run(TopKEF(**SPARSE, momentum=0.5, guard=STORM), graph=True)
    storm(run)
    run.take(5)
    before = {
        n: u.numpy() for n, u in run.compression.state_dict()["velocity"]["residuals"].items()
    }
    exchanged = run.take(6)
    for i, (name, velocity) in enumerate(before.items()):
        mine = 0.5 * velocity + np.ravel(noise(hvd.rank(), 60 + i, Run.shapes[i]))
        mean = hvd.allreduce(mine, name=f"guard.{name.replace('#', '.')}").numpy()
        np.testing.assert_allclose(np.ravel(exchanged[i]), mean, rtol=1e-4, atol=1e-5)


def test_trials_by_the_clock_are_refused() -> None:
    run = Run(TopKEF(**SPARSE, guard=Guard(slower=1.5)), graph=False)
    with pytest.raises(ConfigError, match=r"slower=1\.5, and TensorFlow's graphs take no trials"):
        run.take(0)


def test_narrow_residuals_are_refused() -> None:
    run = Run(TopKEF(**SPARSE, residuals="int8"), graph=False)
    with pytest.raises(ConfigError, match=r"residuals='int8' .* in float32\. Leave residuals= out"):
        run.take(0)


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES)
def test_fit(library: Any) -> None:
    seen = list[StepCounters]()
    compression = TopKEF(**SPARSE, guard=Guard(trend=3.0))
    compression.on_step(seen.append)
    compression.on_step(lambda counters: report(1.0 if counters.step < 25 else np.nan))
    model = fit(library, library.optimizers.SGD(0.05), compression, epochs=5)
    assert [each.fell_back for each in seen].count("trend") == 1
    assert seen[-1].level == 1.0
    assert_ranks_equal(model.get_weights())
