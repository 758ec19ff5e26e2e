"""Schedules decide the ratio level of each step from measures of all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from horovod_topk.errors import ConfigError, check
from horovod_topk.ratios import checked_ratio, make_plain, plain

Profiles = tuple[tuple[float, tuple[tuple[str, Any], ...]], ...]
Decision = tuple[float, ...]  # a ratio level, then the schedule's memory; (): no decision yet
MEMORY = 31  # most numbers in a schedule's memory
UNSETTLED = 2  # steps after a change of level whose times are ignored


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Base of schedules that decide the ratio level of each step: pass one as `schedule=`.

    All ranks make the same decision without a collective: `decide` gets equal numbers on all ranks,
    and has to be deterministic. Subclasses are frozen dataclasses. Their fields are settings, which
    have to be equal on all ranks.

    Args:
        profiles: further settings of a level, by its ratio: settings of the method, or
            `min_numel`, such as {0.1: {"values": "int8"}}. The levels 1.0 and `ratio` of the
            settings cannot have any.
    """

    measures: ClassVar[tuple[str, ...]] = ()  # see `core.codec.measures`

    profiles: Profiles | Mapping[float, Mapping[str, Any]] = ()  # further settings of levels

    def __post_init__(self) -> None:
        make_plain(self)
        pairs = self.profiles.items() if isinstance(self.profiles, Mapping) else self.profiles
        checked = tuple((checked_ratio(r, "a level of profiles"), _pairs(p)) for r, p in pairs)
        object.__setattr__(self, "profiles", checked)

    def profile(self, level: float) -> dict[str, Any]:
        """Further settings of a level, without its ratio."""
        assert not isinstance(self.profiles, Mapping)
        return dict(next((settings for ratio, settings in self.profiles if ratio == level), ()))

    def ratios(self, usual: float) -> tuple[float, ...]:
        """Levels that a step may have besides 1.0 and `usual`, the ratio of the settings."""
        return ()

    def first(self, usual: float) -> float:
        """Level of the first step."""
        return usual

    def decide(
        self, before: Decision, level: float, usual: float, measures: Mapping[str, Sequence[float]]
    ) -> Decision:
        """Return the level of the next step, followed by numbers for `before` in the next call.

        It is called once for each committed step, and may return `MEMORY` such numbers at most.

        Args:
            before: the last return value; (): this is the first call.
            level: the ratio of the step that has ended.
            usual: the ratio of the settings.
            measures: of all ranks, by the names in `self.measures`: finite numbers in rank order.
        """
        raise NotImplementedError(f"{type(self).__name__} has no decide")


@dataclass(frozen=True, kw_only=True)
class Accordion(Schedule):
    """Uses a larger ratio while gradients change fast: at the start, or when their norm changes.

    Steps are grouped in windows. The norm of a window is the root of the sum of squares of its
    gradients, averaged over ranks. If its relative change from the previous window is `threshold`
    or more, training is in a critical phase, and the next window has the ratio `critical`;
    otherwise it has the `ratio` of the settings. The first two windows are critical, as there is no
    change to compute yet.

    The paper compares norms of summed gradients, for each layer, and treats a falling learning rate
    as critical, too. Here all tensors have the same level, and norms are those of ranks' own
    gradients, as this needs no collective of its own.

    Args:
        critical: ratio of critical windows, in (0, 1].
        threshold: smallest relative change of the norm that is critical; above 0.
        window: steps in a window; a tenth of an epoch to one epoch.

    Source: Agarwal et al. 2021 (Adaptive Gradient Communication via Critical Learning Regime
    Identification).
    """

    measures: ClassVar[tuple[str, ...]] = ("gradient",)

    critical: float = 0.1  # ratio of critical windows
    threshold: float = 0.5  # smallest relative change of the norm that is critical
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
        self, before: Decision, level: float, usual: float, measures: Mapping[str, Sequence[float]]
    ) -> Decision:
        """`Schedule.decide`."""
        now, steps, total, last = before or (self.critical, 0.0, 0.0, -1.0)
        steps, total = steps + 1, total + sum(measures["gradient"]) / len(measures["gradient"])
        if steps < self.window:
            return (now, steps, total, last)
        norm = math.sqrt(total)
        is_critical = last < 0.0 or abs(last - norm) >= self.threshold * last
        return (self.critical if is_critical else usual, 0.0, 0.0, norm)


@dataclass(frozen=True, kw_only=True)
class ByNetwork(Schedule):
    """Uses the largest ratio whose exchange is hidden behind backward or fits a time budget.

    In each step every rank measures how long it waits in collectives, and how long the step takes.
    The schedule uses the shortest waiting time of all ranks: other ranks additionally wait for a
    slow rank, which no level can change. After `settle` steps at a level, it compares the mean with
    the limit. Above the limit, the next smaller level is used. Below half of the limit, the next
    larger level is used, but only after a number of steps that doubles, up to 256, whenever a
    larger level has exceeded the limit.

    Levels are the `ratio` of the settings and `levels`. As decisions depend on measured time, a run
    cannot be repeated or resumed bitwise.

    Args:
        levels: larger ratios, in (0, 1]; 1.0 is dense.
        budget: limit of waiting, in seconds a step. None: `share` of the step.
        share: limit of waiting as a share of the step, if there is no budget; above 0.
        settle: steps that are measured at a level, after the first two, which are ignored.
    """

    measures: ClassVar[tuple[str, ...]] = ("exposed", "step")

    levels: tuple[float, ...] = (0.05, 0.1, 0.25)
    budget: float | None = None  # seconds of waiting a step
    share: float = 0.05  # share of a step's seconds
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
        self, before: Decision, level: float, usual: float, measures: Mapping[str, Sequence[float]]
    ) -> Decision:
        """`Schedule.decide`; the measures are those of the step before, at the same level."""
        levels = sorted({usual, *self.levels})
        now, steps, exposed, taken, patience, quiet = before or (usual, 0.0, 0.0, 0.0, 8.0, 0.0)
        if level != now:  # a level of `set_ratio` or of warm-up
            return (now, 0.0, 0.0, 0.0, patience, 0.0)
        steps, quiet = steps + 1, quiet + 1
        if steps <= UNSETTLED:
            return (now, steps, 0.0, 0.0, patience, quiet)
        exposed, taken = exposed + min(measures["exposed"]), taken + max(measures["step"])
        count = steps - UNSETTLED
        if count < self.settle:
            return (now, steps, exposed, taken, patience, quiet)
        allowed = self.share * taken / count if self.budget is None else self.budget
        at, waited = levels.index(now), exposed / count
        if waited > allowed and at > 0:
            tried = quiet <= UNSETTLED + self.settle  # the level has just been raised
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
        return tuple(sorted((str(name), plain(value)) for name, value in pairs))  # type: ignore[attr-defined]
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"profiles has {settings!r}, which is not a mapping of settings",
            cure="Pass a mapping for each ratio, such as profiles={0.1: {'values': 'int8'}}",
        ) from error


def check_above(setting: str, value: object, least: float) -> None:
    """Raise ConfigError if the value of a setting is not a number above `least`."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    is_valid = is_number and least < float(value) < math.inf  # type: ignore[arg-type]
    cure = "Pass such a number, or leave it out"
    check(is_valid, setting, value, f"is not a number above {least}", cure)


def check_steps(setting: str, value: object) -> None:
    """Raise ConfigError if the value of a setting is not a number of steps, 1 or more."""
    is_valid, cure = type(value) is int and value > 0, "Pass a whole number from 1 on"
    check(is_valid, setting, value, "is not a number of steps", cure)
