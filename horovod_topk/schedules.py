"""Schedules: what decides the ratio level of each step from what all ranks have measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from horovod_topk.errors import ConfigError
from horovod_topk.ratios import checked_ratio

Profiles = tuple[tuple[float, tuple[tuple[str, Any], ...]], ...]
Decision = tuple[float, ...]  # a ratio level, and then what the schedule remembers; (): nothing yet
MEMORY = 31  # numbers that a schedule may remember
UNSETTLED = 2  # steps after a change of level, whose times tell nothing of it


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Base of schedules that decide the ratio level of each step: pass one as `schedule=`.

    Every rank decides alike, without a collective: `decide` is given the same numbers everywhere,
    and has to return the same for the same. Subclasses are frozen dataclasses, whose fields are the
    settings that ranks agree on.

    Args:
        profiles: further settings of a level, by its ratio: settings of the method, or
            `min_numel`, such as {0.1: {"values": "int8"}}. The level of the settings' own ratio,
            and 1.0, have none.
    """

    measures: ClassVar[tuple[str, ...]] = ()  # see `horovod_topk.core.measures`

    profiles: Profiles | Mapping[float, Mapping[str, Any]] = ()  # of levels; none

    def __post_init__(self) -> None:
        pairs = self.profiles.items() if isinstance(self.profiles, Mapping) else self.profiles
        checked = tuple((checked_ratio(r, "a level of profiles"), _pairs(p)) for r, p in pairs)
        object.__setattr__(self, "profiles", checked)

    def profile(self, level: float) -> dict[str, Any]:
        """Settings of a level beside its ratio."""
        assert not isinstance(self.profiles, Mapping)
        return dict(next((settings for ratio, settings in self.profiles if ratio == level), ()))

    def ratios(self, usual: float) -> tuple[float, ...]:
        """Levels that a step may have besides 1.0 and `usual`, the ratio of the settings."""
        return ()

    def first(self, usual: float) -> float:
        """Level of the first step."""
        return usual

    def decide(
        self, before: Decision, level: float, usual: float, told: Mapping[str, Sequence[float]]
    ) -> Decision:
        """Return the level of the next step, and what to remember until then, `MEMORY` at most.

        It is called once for each committed step.

        Args:
            before: what it returned last; (): it is called for the first time.
            level: the ratio of the step that has ended.
            usual: the ratio of the settings.
            told: what each rank measured, by the names of `measures`: finite numbers in rank order.
        """
        raise NotImplementedError(f"{type(self).__name__} has no decide")


@dataclass(frozen=True, kw_only=True)
class Accordion(Schedule):
    """A larger ratio while gradients change fast: at the start, and wherever their norm moves.

    Steps are looked at in windows. The norm of a window is the root of the sum of squares of its
    gradients, in the mean of ranks. If it differs from that of the window before by `threshold` of
    it or more, the phase is critical, and the next window has the ratio `critical`; else it has the
    `ratio` of the settings. The first two windows are critical, as there is nothing to compare.

    The paper compares norms of summed gradients, for each layer, and takes a falling learning rate
    for critical, too. Here one level is that of all tensors, and the norm is that of ranks' own
    gradients, as it can be told without an exchange of its own.

    Args:
        critical: ratio of critical windows, in (0, 1].
        threshold: relative change of the norm from which a window is critical; above 0.
        window: steps; a tenth to a whole epoch.

    Source: Agarwal et al. 2021 (Adaptive Gradient Communication via Critical Learning Regime
    Identification).
    """

    measures: ClassVar[tuple[str, ...]] = ("gradient",)

    critical: float = 0.1  # ratio of critical windows
    threshold: float = 0.5  # relative change of the norm, from which on a window is critical
    window: int = 100  # steps

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "critical", checked_ratio(self.critical, "critical"))
        check_above("threshold", self.threshold, 0.0)
        check_steps("window", self.window)

    def ratios(self, usual: float) -> tuple[float, ...]:
        """`Schedule.ratios`."""
        return (self.critical,)

    def first(self, usual: float) -> float:
        """`Schedule.first`."""
        return self.critical

    def decide(
        self, before: Decision, level: float, usual: float, told: Mapping[str, Sequence[float]]
    ) -> Decision:
        """`Schedule.decide`."""
        now, steps, total, last = before or (self.critical, 0.0, 0.0, -1.0)
        steps, total = steps + 1, total + sum(told["gradient"]) / len(told["gradient"])
        if steps < self.window:
            return (now, steps, total, last)
        norm = math.sqrt(total)
        is_critical = last < 0.0 or abs(last - norm) >= self.threshold * last
        return (self.critical if is_critical else usual, 0.0, 0.0, norm)


@dataclass(frozen=True, kw_only=True)
class ByNetwork(Schedule):
    """The largest ratio whose exchange stays hidden behind backward, or within a budget.

    In each step every rank measures how long it waits in collectives, and how long the step takes.
    The shortest waiting of all ranks counts: what others wait beyond that is for a slow rank, and
    no level helps there. After `settle` steps at a level, the mean is compared with what is
    allowed: above it, the next smaller level is taken; below half of it, the next larger one, after
    a while that doubles whenever that has been too much, up to 256 steps.

    Levels are the `ratio` of the settings and `levels`. Decisions follow the clock: a run does not
    repeat to the bit, and does not resume to it.

    Args:
        levels: larger ratios, in (0, 1]; 1.0 is dense.
        budget: seconds of waiting that a step may have. None: `share` of the step.
        share: of a step that may be spent on waiting, where there is no budget, in (0, 1).
        settle: steps that are measured at a level; the first two after a change do not count.
    """

    measures: ClassVar[tuple[str, ...]] = ("exposed", "step")

    levels: tuple[float, ...] = (0.05, 0.1, 0.25)
    budget: float | None = None  # seconds of a step
    share: float = 0.05  # of a step
    settle: int = 4  # steps

    def __post_init__(self) -> None:
        super().__post_init__()
        levels = tuple(checked_ratio(each, "a ratio of levels") for each in self.levels)
        object.__setattr__(self, "levels", levels)
        if self.budget is not None:
            check_above("budget", self.budget, 0.0)
        check_above("share", self.share, 0.0)
        check_steps("settle", self.settle)

    def ratios(self, usual: float) -> tuple[float, ...]:
        """`Schedule.ratios`."""
        return self.levels

    def decide(
        self, before: Decision, level: float, usual: float, told: Mapping[str, Sequence[float]]
    ) -> Decision:
        """`Schedule.decide`: what was told is of the step before, which had the same level."""
        levels = sorted({usual, *self.levels})
        now, steps, exposed, taken, patience, quiet = before or (usual, 0.0, 0.0, 0.0, 8.0, 0.0)
        if level != now:  # a user's, or one of warm-up
            return (now, 0.0, 0.0, 0.0, patience, 0.0)
        steps, quiet = steps + 1, quiet + 1
        if steps <= UNSETTLED:
            return (now, steps, 0.0, 0.0, patience, quiet)
        exposed, taken = exposed + min(told["exposed"]), taken + max(told["step"])
        count = steps - UNSETTLED
        if count < self.settle:
            return (now, steps, exposed, taken, patience, quiet)
        allowed = self.share * taken / count if self.budget is None else self.budget
        at, waited = levels.index(now), exposed / count
        if waited > allowed and at > 0:
            tried = quiet <= UNSETTLED + self.settle  # a larger level, which has just been taken
            patience = min(2 * patience, 256.0) if tried else 8.0
            return (levels[at - 1], 0.0, 0.0, 0.0, patience, quiet)
        if waited < allowed / 2 and at + 1 < len(levels) and quiet >= patience:
            return (levels[at + 1], 0.0, 0.0, 0.0, patience, 0.0)
        return (now, float(UNSETTLED), 0.0, 0.0, patience, quiet)


SCHEDULES: Mapping[str, type[Schedule]] = {"Accordion": Accordion, "ByNetwork": ByNetwork}


def _pairs(settings: object) -> tuple[tuple[str, Any], ...]:
    """Settings as sorted pairs, which can be hashed and compared."""
    pairs = settings.items() if isinstance(settings, Mapping) else settings
    try:
        return tuple(sorted((str(name), value) for name, value in pairs))  # type: ignore[attr-defined]
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"profiles has {settings!r}, which is not a mapping of settings",
            cure="Pass a mapping for each ratio, such as profiles={0.1: {'values': 'int8'}}",
        ) from error


def check_above(setting: str, value: object, least: float) -> None:
    """Raise ConfigError if the value of a setting is not a number above `least`."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (is_number and least < float(value) < math.inf):  # type: ignore[arg-type]
        raise ConfigError(
            f"{setting}={value!r} is not a number above {least}",
            cure="Pass such a number, or leave it out",
        )


def check_steps(setting: str, value: object) -> None:
    """Raise ConfigError if the value of a setting is not a number of steps, 1 or more."""
    if type(value) is not int or value < 1:
        raise ConfigError(
            f"{setting}={value!r} is not a number of steps", cure="Pass a whole number from 1 on"
        )
