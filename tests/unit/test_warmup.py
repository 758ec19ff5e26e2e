"""The ratios of warm-up, as numbers; `tests/properties/test_schedule.py` trains with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from oracle.backends import NUMPY
from oracle.world import World

from horovod_topk.core.control.schedule import Schedule
from horovod_topk.core.plan.buckets import TensorSpec, make_plan
from horovod_topk.core.run.runner import StepRunner
from horovod_topk.errors import ConfigError
from horovod_topk.methods.topk import TopK


def test_exponential_warm_up_is_that_of_deep_gradient_compression() -> None:
    schedule = Schedule(TopK(ratio=0.001, warmup=400))
    assert schedule.levels == (1.0, 0.25, 0.0625, 0.015625, 0.00390625, 0.001)
    ratios = [schedule.ratio_at(step) for step in (0, 99, 100, 199, 200, 300, 399, 400, 10**9)]
    assert ratios == [0.25, 0.25, 0.0625, 0.0625, 0.015625, 0.00390625, 0.00390625, 0.001, 0.001]


@pytest.mark.parametrize(
    ("warmup", "ratio", "expected"),
    [
        (1, 0.01, [0.25, 0.01]),
        (2, 0.01, [0.25, 0.0625, 0.01]),
        (7, 0.05, [0.25] * 4 + [0.0625] * 3 + [0.05]),
        (5, 0.25, [0.25] * 6),
        (5, 1.0, [1.0] * 6),
        ([(2, 0.5), (3, 1.0)], 0.1, [0.5, 0.5, 1.0, 0.1]),
        ([[1, 1]], 0.1, [1.0, 0.1, 0.1]),
        (None, 0.1, [0.1, 0.1]),
    ],
)
def test_the_ratio_of_each_step(warmup: Any, ratio: float, expected: list[float]) -> None:
    schedule = Schedule(TopK(ratio=ratio, warmup=warmup))
    assert [schedule.ratio_at(step) for step in range(len(expected))] == expected
    assert {1.0, ratio} <= set(schedule.levels)


@pytest.mark.parametrize(
    "warmup",
    [
        *(0, -5, True, 1000.0, "1000", (), [5], [True], {"a": 1}),
        *([(0, 0.5)], [(2, 0.5), (2, 0.1)], [(2, 0.5), (1, 0.1)], [(1.5, 0.5)], [(1, 0.5, 2)]),
    ],
)
def test_what_is_no_warm_up(warmup: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        TopK(warmup=warmup)
    assert str(caught.value).startswith(f"warmup={warmup!r} is neither a number of steps nor")
    assert "such as warmup=1000" in str(caught.value)


@pytest.mark.parametrize("ratio", [0.0, 1.5, "0.5", None])
def test_ratios_of_warm_up_are_checked(ratio: Any) -> None:
    with pytest.raises(ConfigError, match="a ratio of warmup="):
        TopK(warmup=[(10, ratio)])


def test_settings_with_warm_up_are_hashable_and_compare_by_value() -> None:
    pairs = TopK(warmup=[[10, 0.5]])
    assert pairs == TopK(warmup=((10, 0.5),))
    assert hash(pairs) == hash(TopK(warmup=((10, 0.5),)))


def test_settings_of_a_level() -> None:
    config = TopK(0.01, values="int8", exchange="sharded", gather_ratio=0.05, warmup=100)
    schedule = Schedule(config)
    assert schedule.settings(0.01) is config
    warm, dense = schedule.settings(0.25), schedule.settings(1.0)
    assert (warm.ratio, warm.ratio_back, warm.values) == (0.25, 0.25, "int8")
    assert (dense.ratio, dense.ratio_back, dense.values) == (1.0, 1.0, "float32")
    assert Schedule(TopK(0.01)).settings(1.0).ratio_back == 1.0


def compressor(**settings: Any) -> StepRunner[Any]:
    plan = make_plan([TensorSpec("w", (50,), "float32")], TopK(0.1, **settings))
    return World(plan, 2, NUMPY).ranks[0]


def test_a_ratio_that_is_no_level_is_refused() -> None:
    one = compressor(warmup=[(5, 0.5)])
    with pytest.raises(ConfigError, match=r"ratio 0\.2 is none of this optimizer's, 1\.0, 0\.5, 0"):
        one.set_ratio(0.2)
    assert one.ratio == 0.5
    one.set_ratio(0.1)
    assert one.ratio == 0.1
    one.set_ratio(None)
    assert one.ratio == 0.5


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"values": "int4"}, "values='int4' are rounded"),
        ({"exchange": "sharded", "gather_ratio": 0.1}, "owners send back 0.1 of the elements"),
        ({"ratios": (("w", 0.1),)}, "'w' sends 0.1 of its elements"),
    ],
)
def test_a_dense_step_that_would_not_send_all_is_refused(settings: Any, why: str) -> None:
    plan = make_plan([TensorSpec("w", (50,), "float32")], TopK(1.0, min_numel=0, **settings))
    one = World(plan, 2, NUMPY).ranks[0]
    with pytest.raises(ConfigError, match=f"ratio 1.0 is this optimizer's own, at which {why}"):
        one.set_ratio(1.0)
    one.set_ratio(None)
    plan = make_plan([TensorSpec("w", (50,), "float32")], TopK(0.5, min_numel=0, **settings))
    World(plan, 2, NUMPY).ranks[0].set_ratio(1.0)


def test_plans_differ_where_warm_up_does() -> None:
    digests = {compressor(warmup=w).plan.digest for w in (None, 5, 6, [(5, 0.25)])}
    assert len(digests) == 4
    one = compressor(warmup=5)
    one.launch(0, [np.ones(50, np.float32)])
    assert one.plan.digest not in digests


def test_a_state_from_before_warm_up_keeps_the_count() -> None:
    one = compressor(warmup=5)
    one.load_state_dict(compressor().state_dict())
    assert one.ratio == 0.25
