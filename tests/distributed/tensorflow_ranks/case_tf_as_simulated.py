"""Every method and exchange in TensorFlow, beside simulated ranks: see ../simulated.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import pytest
import tensorflow as tf
from tapes import Linear

import horovod_topk.tensorflow
from horovod_topk.core.control import allocation
from horovod_topk.core.plan.nodes import Location
from simulated import ROWS, SHAPES, Row, assert_as_simulated


class Taped:
    """`simulated.Harness` of variables behind a tape, in a tf.function or eager."""

    def __init__(self, row: Row, graph: bool, name: str) -> None:
        make = getattr(horovod_topk.tensorflow, row.method)
        self.compression = make(**row.settings, name=f"{name}.{graph}")
        if graph:
            self.compression.set_ratio(None)  # so that traces have a branch for each ratio
        self._model, self._graph = Linear(SHAPES), graph
        self.names = ["v", "v#2", "v#3"]

    @property
    def plan(self) -> Any:
        """At the ratio of the settings."""
        (state,) = self.compression._living_states()
        (cached,) = state._plans.values()
        return cached.plan

    def exchange(self, gradients: Sequence[Any]) -> list[Any]:
        given = [tf.constant(each) for each in gradients]
        return self._model.exchange(self.compression, given, graph=self._graph)


def marks_of(row: Row) -> list[pytest.MarkDecorator]:
    """Random numbers take seconds to trace, with three ranks a minute."""
    several = row.method in ("RandomK", "QSGD") and "exchange" in row.settings
    is_slow = several or row.method in ("Dithered", "TernGrad")
    return [pytest.mark.slow, pytest.mark.world_size(2)] if is_slow else []


@pytest.mark.one_in(28, first=10)
@pytest.mark.everywhere
@pytest.mark.world_size(2, 3, 4)
@pytest.mark.parametrize(
    ("row", "graph"),
    [
        pytest.param(row, graph, id=f"{name}-{'graph' if graph else 'eager'}", marks=marks_of(row))
        for position, (name, row) in enumerate(ROWS.items())
        if "residuals" not in row.settings
        for graph in ((True, False) if position % 2 else (False, True))
        if not (graph and "allocation" in row.settings)  # which is refused
    ],
)
def test_each_step_is_that_of_simulated_ranks(
    row: Row, graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocation, "FIRST", 1)  # allocations after 1, 2, 4 committed steps
    here = Location("host", 0, int(hvd.rank() >= -(-hvd.size() // 2)))
    monkeypatch.setattr("horovod_topk.process_sets.here", lambda rank, local: here)
    made: list[Taped] = []

    def make(name: str) -> Taped:
        """Return a tape. In a graph the second is the first, reset: it is not traced again."""
        if graph and made:
            made[0].compression.reset()
        else:
            made[:] = [Taped(row, graph, name)]
        return made[0]

    assert_as_simulated(make, row, hvd.rank(), hvd.size())
