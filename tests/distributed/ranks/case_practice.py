"""The loops of docs/practice.md (scripts/study/practice) on real ranks, cut short."""

from __future__ import annotations

import math

import pytest

from study.practice import agenda
from study.practice.agenda import WAYS, Trial
from study.practice.training import train

pytestmark = pytest.mark.world_size(2)
STEPS = 8


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agenda, "STEPS", STEPS)
    monkeypatch.setattr(agenda, "RESTART_AT", STEPS // 2)
    monkeypatch.setattr(agenda, "SPIKE_EVERY", 3)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", WAYS)
def test_a_way_ends_with_equal_ranks_and_fewer_bytes(name: str) -> None:
    """`train` fails where ranks end with different weights."""
    found = train(Trial(name, 0.01, seed=0), lr=0.01)
    assert 0 < found["sent_bytes"] < found["dense_bytes"]
    assert math.isfinite(found["accuracy"])


@pytest.mark.parametrize("ratio", agenda.RATIOS)
def test_a_restart_ends_where_the_run_that_went_on_does(ratio: float) -> None:
    ends = [train(Trial(name, ratio, seed=1), lr=0.05)["weights"] for name in ("plain", "restart")]
    assert ends[0] == ends[1] != train(Trial("plain", ratio, seed=2), lr=0.05)["weights"]


@pytest.mark.slow
def test_the_loss_scale_grows_until_a_step_overflows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("study.practice.training.GROWTH_INTERVAL", 1)
    monkeypatch.setattr(agenda, "STEPS", 40)
    assert train(Trial("float16", 0.01, seed=0), lr=0.01)["overflows"] > 0


def test_dense_sends_all() -> None:
    found = train(Trial("clipped", None, seed=0), lr=0.01)
    assert found["sent_bytes"] == found["dense_bytes"]
