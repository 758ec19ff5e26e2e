"""Ratios that change from step to step: in graphs that do not, in eager mode, and in `fit`."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
from kerasses import LIBRARIES, fit, same
from oracle.schedules import ByGradient
from proof import assert_ranks_equal
from tapes import Run, equal

import horovod_topk.tensorflow
from horovod_topk.core.control import allocation
from horovod_topk.core.plan.buckets import TensorSpec, make_plan
from horovod_topk.core.run.stats import StepCounters
from horovod_topk.errors import ConfigError, StateDictError
from horovod_topk.methods.topk import TopK
from horovod_topk.tensorflow.planning import CachedPlan
from plain import PlainTopKEF as TopKEF

SPARSE = {"ratio": 0.05, "min_numel": 0}
WARM = SPARSE | {"warmup": [(2, 0.5), (4, 0.2)]}
WAYS = pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])


@WAYS
def test_skipped_steps_do_not_count(graph: bool) -> None:
    run = Run(TopKEF(**SPARSE, warmup=[(2, 0.5)]), graph)
    run.take(0)
    for step in range(3):
        run.take(step, np.inf if hvd.rank() == 1 else 1.0)
    (state,) = run.compression._living_states()
    assert (state.ratio, state.stats().rolled_back) == (0.5, 3)
    run.take(1)
    assert state.ratio == 0.05


@pytest.mark.one_in(2)
@WAYS
def test_a_schedule_decides_in_graphs(graph: bool) -> None:
    """After steps of large gradients; what is saved has the decision."""
    settings = SPARSE | {"schedule": ByGradient()}
    first, again = Run(TopKEF(**settings), graph), Run(TopKEF(**settings), graph=False)
    levels, sizes = [], []
    for step, factor in enumerate((0.01, 1.0, np.nan, 0.01, 1.0, 0.01)):
        if step == 5:
            again.compression.load_state_dict(first.compression.state_dict())
        exchanged = first.take(step, factor)
        if step == 5:
            assert equal(again.take(step, factor), exchanged)
            assert first.seen[-1].sent_bytes == again.seen[-1].sent_bytes
        levels.append(first.compression.behind.clock.decision[0])
        sizes.append(first.seen[-1].sent_bytes)
    assert levels == [0.05, 0.25, 0.25, 0.05, 0.25, 0.05]
    assert sizes[0] == sizes[1] == sizes[4] < sizes[2] == sizes[3] == sizes[5]
    assert hvd.allgather_object(levels) == [levels] * hvd.size()
    last = first.seen[-1]
    assert 0.0 < last.exposed_seconds <= last.exchange_seconds < 60.0
    assert last.compress_seconds > 0.0
    assert last.decompress_seconds > 0.0


@pytest.mark.slow
def test_a_count_that_is_none_is_refused() -> None:
    run = Run(TopKEF(**WARM), graph=True)
    run.take(0)
    state = run.compression.state_dict()
    with pytest.raises(StateDictError, match="'two' steps were committed"):
        run.compression.load_state_dict(state | {"committed": "two"})


def test_what_cannot_work_is_refused() -> None:
    run = Run(TopKEF(**SPARSE), graph=True)
    with pytest.raises(ConfigError, match=r"ratio 0\.3 is none"):
        run.compression.set_ratio(0.3)
    run.take(0)
    with pytest.raises(ConfigError, match=r"traced for ratio 0\.05 alone"):
        run.compression.set_ratio(1.0)


def test_an_allocation_in_a_graph_is_refused() -> None:
    run = Run(TopKEF(**SPARSE, allocation="adaptive"), graph=True)
    with pytest.raises(ConfigError, match=r"fixes the sizes of payloads.*run_eagerly=True"):
        run.take(0)


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES)
def test_fit(library: Any) -> None:
    compression, seen = TopKEF(**WARM), list[StepCounters]()
    compression.on_step(seen.append)
    model = fit(library, library.optimizers.SGD(0.05), compression, epochs=2)
    assert TopKEF.of(model.optimizer).ratio == 0.05
    sizes = [counters.sent_bytes for counters in seen]
    assert len(sizes) == 16
    assert sizes[0] == sizes[1] > sizes[2] == sizes[3] > sizes[4] == sizes[15]
    assert_ranks_equal(model.get_weights())


def test_an_allocation_holds_where_all_of_its_tensors_are_exchanged() -> None:
    """Among fewer tensors the sum of bytes would be another."""
    specs = [TensorSpec(name, (30, 20), "float32") for name in "ab"]
    cached = CachedPlan(tuple(specs), make_plan(specs, TopK(ratio=0.05, min_numel=0)), "tape", 0)
    assert cached.at(0.05, (("a", 4), ("c", -4))) is cached
    a, b = cached.at(0.05, (("a", 4), ("b", -4))).plan.tensors()
    assert (a.entries, b.entries) == (60, 15)


@pytest.mark.slow
@pytest.mark.one_in(4)
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
@pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES)
def test_bytes_are_allocated_in_fit(
    library: Any, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the optimizer's adapted update; until the first allocation all have one ratio."""
    sizes = list[int]()

    def trained(first: int, by: str = "adaptive") -> Any:
        monkeypatch.setattr(allocation, "FIRST", first)
        settings = SPARSE | {"allocation": by, "warmup": None, "follow_lr": False}
        compression = horovod_topk.tensorflow.TopKEF(**settings)
        compression.on_step(lambda counters: sizes.append(counters.sent_bytes))
        own = getattr(library.optimizers, optimizer)(0.05)
        model = fit(library, own, compression, epochs=1, eager=True, examples=58)
        ratios = compression.behind.stats().ratios.values()
        assert any(ratio < 0.05 for ratio in ratios) == (first < 8)
        return model

    assert same(trained(60), trained(60, by="uniform"))
    sizes.clear()
    model = trained(2)  # allocations after 2, 4, 8 committed steps
    assert len(sizes) == 8 and sizes[0] == sizes[1] >= max(sizes)
    assert_ranks_equal(model.get_weights())
