"""Ratio levels: each step has one of a few ratios, which are fixed when the optimizer is built.

The first of these that applies is the ratio of a step: 1.0 (dense), if the guard has ended
compression (`core.control.guard`); the ratio that a user asked for on all ranks; the ratio of
`warmup` in the first steps; the decision of `schedule`; the ratio of the settings.

Deep Gradient Compression (Lin et al. 2018, section 3.3) begins with large ratios, as early
gradients change fast, so that delayed ones do harm: `warmup` lists these ratios. Its level depends
on the number of committed steps. `schedule` decides from the measures of earlier steps
(`core.codec.measures`). Both are equal on all ranks. A change of level leaves residuals as
they are.

Dense (1.0) is always a level, at full precision in all collectives: a step at this level sends all
residuals and leaves zeros.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from horovod_topk import schedules
from horovod_topk.config import Settings, fields_of, settings_of
from horovod_topk.core.codec.measures import Measures
from horovod_topk.core.plan.facts import START
from horovod_topk.errors import ConfigError
from horovod_topk.methods.protocol import Allocation, Method
from horovod_topk.schedules import MEMORY, Decision

__all__ = ["DENSE", "LEVELS", "MEMORY", "Clock", "Counter", "Decision", "HostCounter", "Schedule"]

log = logging.getLogger("horovod_topk")

DENSE = 1.0


PROFILED = {"min_numel", "ratio"}  # settings of all methods that a level may change
Where = Callable[[Any, Any, Any], Any]
LEVELS = 8  # largest number of levels with a schedule: graphs have a branch for each


def chosen(condition: bool, this: Any, other: Any) -> Any:
    """Return `this` if the condition is true, else `other`: `where` of plain numbers."""
    return this if condition else other


class Clock(NamedTuple):
    """All that determines the ratio of the next step, as sent to ranks that join."""

    committed: int  # number of committed steps
    asked: float | None = None  # the ratio a user asked for, if one did
    decision: Decision = ()  # the schedule's last decision
    guard: Sequence[float] = ()  # the guard's memory


class Counter(Protocol):
    """Stores the counters that determine the ratio of the next step."""

    committed: int  # number of committed steps, including those of a loaded state
    asked: float | None  # the ratio that a user asked for instead of the schedule's
    decision: Decision  # the schedule's last decision
    lineage: int  # digest of what was loaded, reset or left out: `core.plan.facts`


@dataclass
class HostCounter:
    """`Counter` in plain numbers."""

    committed: int = 0
    asked: float | None = None
    decision: Decision = ()
    lineage: int = START


class Schedule:
    """The ratio levels of one optimizer's settings, and the level of each step.

    Raises:
        ConfigError: `schedule` has too many levels.
    """

    def __init__(self, config: Method) -> None:
        self._config = config
        self._stretches, self._schedule = config.stretches, config.schedule
        if self.decides and len(self.levels) > LEVELS:
            raise ConfigError(
                f"the schedule and warmup= have {len(self.levels)} ratios, "
                f"{', '.join(map(str, self.levels))}, and an optimizer may have {LEVELS}",
                cure="Pass a schedule with fewer levels, or fewer pairs in warmup=",
            )
        if self._schedule is not None:
            self._check_profiles(self._schedule)
        if config.guard is not None and config.ratio == DENSE:
            raise ConfigError(
                f"guard= was given, and {type(config).__name__} sends all elements as it is set: "
                "there is nothing denser to fall back to",
                cure="Leave guard= out, or pass a ratio below 1",
            )

    @property
    def decides(self) -> bool:
        """Whether a schedule decides levels from measures."""
        return self._schedule is not None

    @cached_property
    def levels(self) -> tuple[float, ...]:
        """Every ratio that a step can have, largest first."""
        usual = self._config.ratio
        ratios = {DENSE, usual, *(ratio for _, ratio in self._stretches)}
        if self._schedule is not None:
            ratios |= {*self._schedule.ratios(usual)}
        return tuple(sorted(ratios, reverse=True))

    @property
    def ratio_after_warmup(self) -> float:
        """The ratio after warm-up as long as the schedule has made no decision."""
        usual = self._config.ratio
        return usual if self._schedule is None else self._schedule.first(usual)

    def ratio_at(
        self,
        committed: int,
        decision: Decision = (),
        asked: float | None = None,
        *,
        has_ended: bool = False,
        is_trial: bool = False,
    ) -> float:
        """Ratio of the step after `committed` committed ones, given what `level_of` gets."""
        known = committed, self.position(decision[0] if decision else None), self.position(asked)
        level: int = self.level_of(*known, has_ended=has_ended, is_trial=is_trial)
        return self.levels[level]

    def level_of(
        self,
        committed: Any,
        decided: Any,
        asked: Any,
        *,
        has_ended: Any = False,
        is_trial: bool = False,
        where: Where = chosen,
    ) -> Any:
        """Position of the next step's ratio among the levels: of numbers, or of scalars in a graph.

        Args:
            committed: number of committed steps.
            decided: position of the level that the schedule has decided on; -1: no decision.
            asked: position of the ratio that a user asked for; -1: none was asked for.
            has_ended: whether the guard has ended compression.
            is_trial: whether the guard tries a dense step.
            where: returns the second argument if the first is true, else the third.
        """
        level = where(decided < 0, self.position(self.ratio_after_warmup), decided)
        for until, ratio in reversed(self._stretches):
            level = where(committed < until, self.position(ratio), level)
        dense = self.position(DENSE)
        level = where(asked < 0, dense if is_trial else level, asked)
        return where(has_ended, dense, level)

    def decide(self, before: Decision, level: float, measures: Measures | None) -> Decision:
        """Return the schedule's decision at the end of a committed step.

        Args:
            before: the decision before.
            level: the ratio of the step.
            measures: measures of all ranks in the step; None: not known, `before` is returned.
        """
        if self._schedule is None or measures is None:
            return before
        decision = self._schedule.decide(before, level, self._config.ratio, measures)
        assert decision[0] in self.levels
        assert len(decision) <= MEMORY + 1
        return decision

    def usable(self, saved: Sequence[float]) -> Decision:
        """A decision of a checkpoint or another rank, if its level is a level here; else ()."""
        if not saved or not self.decides:
            return ()
        if saved[0] in self.levels:
            return tuple(saved)
        log.warning("TopKEF: the checkpoint's level %s is no ratio of this optimizer's", saved[0])
        return ()

    def check(self, ratio: float) -> None:
        """Refuse a ratio that is no level, and a ratio of 1.0 that would not send all elements.

        Raises:
            ConfigError: `ratio` is no level, or is 1.0 with a method that does not send all.
        """
        if ratio not in self.levels:
            raise ConfigError(
                f"ratio {ratio!r} is none of this optimizer's, {', '.join(map(str, self.levels))}",
                cure="Pass one of them, or list it in warmup= when the optimizer is built: ranks "
                "agree on all ratios there",
            )
        withheld = self._config.withheld()
        if ratio == DENSE == self._config.ratio and withheld:
            raise ConfigError(
                f"ratio 1.0 is this optimizer's own, at which {withheld}: no step sends all",
                cure="Pass a ratio below 1 for '*' when the optimizer is built, and 'dense' for "
                "other patterns such as '?*'",
            )

    def level(self, saved: float | None, otherwise: float | None) -> float | None:
        """The ratio that a user asked for, as saved in a checkpoint, if it is a level here."""
        if saved is None:
            return otherwise
        if saved in self.levels:
            return saved
        log.warning("TopKEF: the checkpoint's set_ratio(%s) is no ratio of this optimizer's", saved)
        return otherwise

    def settings(self, ratio: float, allocation: Allocation = ()) -> Method:
        """The settings at a ratio level.

        allocation: which share of its elements each tensor sends; empty: the ratio's.
        """
        settings = self._config.at(ratio)
        profile = {} if self._schedule is None else self._schedule.profile(ratio)
        changed = fields_of(type(settings), profile)[0] if profile else {}
        if allocation and ratio >= self._config.ratio:  # below, others would be sent whole
            changed["allocation"] = allocation
        return replace(settings, **changed) if changed else settings

    def _check_profiles(self, schedule: schedules.Schedule) -> None:
        """Refuse profiles for ratios that cannot have one, or of settings that cannot change."""
        method = type(self._config)
        allowed = settings_of(method).keys() - (settings_of(Settings).keys() - PROFILED)
        assert not isinstance(schedule.profiles, Mapping)
        for ratio, settings in schedule.profiles:
            names = {name for name, _ in settings}
            if ratio not in self.levels or ratio in (DENSE, self._config.ratio):
                raise ConfigError(
                    f"profiles has settings for {ratio}, which is not one of the levels that may "
                    "have some",
                    cure="Leave out 1.0, the ratio of the settings, and ratios that no step has",
                )
            if unknown := sorted(names - allowed):
                raise ConfigError(
                    f"profiles sets {', '.join(unknown)} for {ratio}, which is the same at all "
                    "levels",
                    cure=f"Set some of {', '.join(sorted(allowed))}",
                )
            found, _ = fields_of(method, dict(settings))
            if "ratios" in found or found.get("ratio", ratio) != ratio:
                raise ConfigError(
                    f"profiles sets ratio={dict(settings)['ratio']!r} for the level {ratio}",
                    cure=f"Pass a pair that begins with {ratio}, what ranks and what owners send, "
                    "or leave ratio out",
                )
            self.settings(ratio)  # checks the values

    def position(self, ratio: float | None) -> int:
        """Position of a ratio among the levels; -1: None."""
        return -1 if ratio is None else self.levels.index(ratio)

    def below_usual(self, ratio: float) -> int:
        """How many levels a ratio is below that of the settings; negative: above it."""
        return self.position(ratio) - self.position(self._config.ratio)
