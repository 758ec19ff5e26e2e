"""Schedules by themselves: which level follows from which measures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from horovod_topk.core.control.schedule import Schedule as Levels
from horovod_topk.errors import ConfigError
from horovod_topk.methods.topk import TopK
from horovod_topk.schedules import MEMORY, Accordion, ByNetwork, Decision, Schedule


def run(
    schedule: Schedule, steps: int, told: Callable[[float, int], dict[str, list[float]]]
) -> list[float]:
    """The level of each step; what is told is given its level and number."""
    levels, decision = Levels(TopK(0.02, schedule=schedule)), Decision()
    taken, before = [], levels.ratio_at(0, decision)
    for step in range(steps):
        level = levels.ratio_at(step, decision)
        taken.append(level)
        decision = levels.decide(decision, level, told(before, step))
        assert len(decision) <= MEMORY + 1
        before = level
    return taken


# Accordion.


def by_norm(*norms: float) -> Callable[[float, int], dict[str, list[float]]]:
    """Norms of windows of ten steps, of two ranks of which one has three times the squares."""
    return lambda _, step: {"gradient": [f * norms[step // 10] ** 2 for f in (0.5, 1.5)]}


def test_accordion_takes_the_critical_ratio_where_norms_move() -> None:
    taken = run(Accordion(critical=0.1, window=10), 70, by_norm(8, 7, 6.9, 6.8, 3.3, 3.2, 3.1))
    assert taken[::10] == [0.1, 0.1, 0.02, 0.02, 0.02, 0.1, 0.02]
    assert taken == [level for level in taken[::10] for _ in range(10)]


def test_accordion_is_critical_where_norms_grow_and_where_they_were_zero() -> None:
    assert run(Accordion(window=10), 40, by_norm(1, 1, 1.6, 1.6))[::10] == [0.1, 0.1, 0.02, 0.1]
    assert run(Accordion(window=10), 40, by_norm(0, 0, 1, 1))[::10] == [0.1, 0.1, 0.1, 0.1]


# By network.


def link(seconds: Callable[[int], float], hidden: float = 0.1) -> Any:
    """An exchange of so many seconds for each element's share, of which backward hides some.

    The second rank waits longer, as the first one is slow.
    """

    def told(level: float, step: int) -> dict[str, list[float]]:
        exposed = max(0.0, level * seconds(step) - hidden)
        return {"exposed": [exposed, exposed + 0.1], "step": [0.2 + exposed] * 2}

    return told


ALL = (0.02, 0.05, 0.1, 0.25, 1.0)
LEVELS = ByNetwork(levels=ALL[1:])


@pytest.mark.parametrize(
    ("seconds", "largest"), [(0.05, 1.0), (0.3, 0.25), (0.9, 0.1), (1.9, 0.05), (100.0, 0.02)]
)
def test_the_largest_level_that_stays_hidden(seconds: float, largest: float) -> None:
    taken = run(LEVELS, 400, link(lambda step: seconds))
    assert sum(level == largest for level in taken[50:]) > 0.9 * 350
    assert min(taken[50:]) == largest


@pytest.mark.parametrize(("first", "then"), [(0.05, 1.9), (0.05, 100.0), (0.3, 0.9)])
def test_a_link_that_becomes_slow_is_answered_within_fifty_steps(first: float, then: float) -> None:
    taken = run(LEVELS, 300, link(lambda step: first if step < 200 else then))
    largest = max(each for each in ALL if each * then <= 0.11 or each == 0.02)
    assert taken[199] > largest
    assert taken[250:].count(largest) >= 40


def test_a_link_that_becomes_fast_is_noticed() -> None:
    taken = run(LEVELS, 700, link(lambda step: 100.0 if step < 200 else 0.05))
    assert taken[199] == 0.02
    assert taken[699] == 1.0


def test_a_budget_is_in_seconds() -> None:
    schedule = ByNetwork(levels=(0.05, 0.1, 0.25), budget=0.1)
    taken = run(schedule, 300, link(lambda step: 1.9))
    assert taken[-100:].count(0.1) > 90


def test_what_a_user_asks_for_is_not_measured() -> None:
    levels = Levels(TopK(0.02, schedule=LEVELS))
    decision = levels.decide((), 0.02, {"exposed": [0.0], "step": [0.1]})
    assert levels.decide(decision, 1.0, {"exposed": [9.0], "step": [9.0]})[:2] == (0.02, 0.0)


# Settings.


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Accordion(critical=0.0), "critical=0.0 lies outside"),
        (lambda: Accordion(threshold=0.0), "threshold=0.0 is not a number above"),
        (lambda: Accordion(window=0), "window=0 is not a number of steps"),
        (lambda: ByNetwork(levels=(2.0,)), "a ratio of levels=2.0 lies outside"),
        (lambda: ByNetwork(budget=-1.0), "budget=-1.0 is not a number above"),
    ],
)
def test_settings_out_of_range(make: Callable[[], Schedule], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


# Profiles.


def test_a_level_has_settings_of_its_own() -> None:
    schedule = Accordion(critical=0.1, profiles={0.1: {"values": "int8", "min_numel": 5}})
    levels = Levels(TopK(0.02, values="int4", schedule=schedule))
    critical, usual, dense = (levels.settings(ratio) for ratio in (0.1, 0.02, 1.0))
    assert isinstance(critical, TopK)
    assert (critical.ratio, critical.values, critical.min_numel) == (0.1, "int8", 5)
    assert isinstance(usual, TopK)
    assert isinstance(dense, TopK)
    assert (usual.values, dense.values, dense.min_numel) == ("int4", "float32", 1024)
    assert hash(schedule) == hash(Accordion(critical=0.1, profiles=schedule.profiles))


@pytest.mark.parametrize(
    ("profiles", "message"),
    [
        ({0.3: {"values": "int8"}}, "not one of the levels"),
        ({0.02: {"values": "int8"}}, "not one of the levels"),
        ({0.1: {"momentum": 0.9}}, "sets momentum for 0.1, which is the same"),
        ({0.1: {"values": "int7"}}, "values='int7' is not one of the choices"),
        ({0.1: 5}, "not a mapping of settings"),
    ],
)
def test_profiles_that_cannot_be(profiles: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Levels(TopK(0.02, schedule=Accordion(critical=0.1, profiles=profiles)))
