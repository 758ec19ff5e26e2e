"""Ratios that change from step to step, on all ranks at once."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from oracle.schedules import ByGradient

import training
from plain import PlainTopKEF as TopKEF
from resuming import assert_resumes
from training import Setup
from world import hvd

SPARSE = {"ratio": 0.05, "min_numel": 0}
SETUP = Setup(optimizer=training.plain_sgd)


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
def test_a_schedule_decides_alike_and_resumes(
    exchange: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pytest.importorskip("safetensors")
    seen, settings = list[tuple[float, float]](), SPARSE | {"exchange": exchange}

    def take(task: Any, optimizer: Any, step: int) -> None:
        training.ordinary(task, optimizer, step)
        level, _, mean = TopKEF.of(optimizer).clock.decision
        seen.append((level, mean))

    task, optimizer = SETUP.start(TopKEF(**settings, schedule=ByGradient(limit=1e9)))
    for step in range(6):
        take(task, optimizer, step)
    middle = sorted(mean for _, mean in seen)[3]
    seen.clear()
    make = partial(TopKEF, **settings, schedule=ByGradient(limit=0.9 * middle))
    assert_resumes(lambda: SETUP.start(make()), tmp_path_factory.mktemp("decision"), take)
    assert len({level for level, _ in seen}) == 2
    assert hvd.allgather_object(seen) == [seen] * hvd.size()


def test_every_step_has_its_seconds_and_a_probe_its_cosine() -> None:
    """At ratio 1.0 and full precision, what is applied is what dense is."""
    seen, task = list[Any](), SETUP.task()
    compressor = TopKEF(ratio=1.0, values="float32")
    optimizer = SETUP.distributed(task, compressor)
    TopKEF.of(optimizer).on_step(seen.append)
    TopKEF.of(optimizer).probe(every=2)
    training.train(task, optimizer, range(4))
    for counters in seen:
        assert 0.0 < counters.exposed_seconds <= counters.exchange_seconds < 60.0
        assert counters.compress_seconds > 0.0
        assert counters.decompress_seconds > 0.0
        assert counters.probe_cosine == pytest.approx(1.0, abs=1e-6)
        assert counters.probe_error == pytest.approx(0.0, abs=1e-6)
    stats = TopKEF.of(optimizer).stats()
    assert stats.exposed_seconds == pytest.approx(sum(each.exposed_seconds for each in seen))
    assert stats.memory_bytes == seen[0].memory_bytes > 0
