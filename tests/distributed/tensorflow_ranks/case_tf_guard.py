"""The guard in TensorFlow: in traced graphs, in eager mode, and in Keras' `fit`."""

from __future__ import annotations

import horovod.tensorflow as hvd
import numpy as np
import pytest
from tapes import Run, equal

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
    dense = Run(hvd.Compression.none, graph)
    storm(run)
    run.take(5)
    assert [each.fell_back for each in run.seen] == [*[""] * 4, "non-finite", ""]
    assert [each.level for each in run.seen] == [*[0.05] * 5, 1.0]
    again = Run(TopKEF(**SPARSE, exchange=exchange, guard=STORM), graph=False)
    again.compression.load_state_dict(run.compression.state_dict())
    for step in range(6, 9):
        exchanged = run.take(step)
        assert equal(exchanged, dense.take(step))
        assert equal(exchanged, again.take(step))
    stats = run.compression.stats()
    assert (stats.residual_norm, stats.level, stats.fallbacks) == (0.0, 1.0, {"non-finite": 1})


def test_trials_by_the_clock_are_refused() -> None:
    run = Run(TopKEF(**SPARSE, guard=Guard(slower=1.5)), graph=False)
    with pytest.raises(ConfigError, match=r"slower=1\.5, and TensorFlow's graphs take no trials"):
        run.take(0)


def test_narrow_residuals_are_refused() -> None:
    run = Run(TopKEF(**SPARSE, residuals="int8"), graph=False)
    with pytest.raises(ConfigError, match=r"residuals='int8' .* in float32\. Leave residuals= out"):
        run.take(0)
