"""Which ratio each step has: one of a few ratio levels, fixed when the optimizer is built.

In this order: dense, where the guard has fallen back (`horovod_topk.core.guard`); the ratio that a
user asked for on all ranks; that of `warmup` in the first steps; what `schedule` has decided; the
ratio of the settings.

Deep Gradient Compression (Lin et al. 2018, section 3.3) begins with large ratios, as early
gradients change fast and are badly served by delay: `warmup` lists them. There a step's level
follows from how many steps were committed, which every rank knows alike. `schedule` decides from
what ranks have told each other in the steps before (`horovod_topk.core.measures`), which every rank
has alike. Residuals stay where they are from level to level.

Dense (1.0) is always a level, at full precision and back from owners too: a step of it sends
all residuals and leaves zeros.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple, Protocol

from horovod_topk import schedules
from horovod_topk.config import Settings
from horovod_topk.core.measures import Heard
from horovod_topk.errors import ConfigError
from horovod_topk.methods.protocol import Method
from horovod_topk.schedules import MEMORY, Decision

__all__ = ["DENSE", "LEVELS", "MEMORY", "Clock", "Counter", "Decision", "HostCounter", "Schedule"]

log = logging.getLogger("horovod_topk")

DENSE = 1.0


PROFILED = {"min_numel"}  # settings of all methods that a level may change
LEVELS = 8  # at most, where a schedule decides: graphs have a branch for each


class Clock(NamedTuple):
    """What the ratio of the next step follows from."""

    committed: int  # steps
    asked: float | None = None  # the ratio a user asked for, if one did
    decision: Decision = ()  # what the schedule decided last, and remembers
    guard: Sequence[float] = ()  # what the guard remembers


class Counter(Protocol):
    """What the ratio of the next step follows from."""

    committed: int  # steps, with those of a loaded state
    asked: float | None  # the ratio that a user asked for instead of the schedule's
    decision: Decision  # what the schedule decided last, and remembers


@dataclass
class HostCounter:
    """`Counter` in plain numbers."""

    committed: int = 0
    asked: float | None = None
    decision: Decision = ()


class Schedule:
    """The ratio levels of one optimizer's settings, and when each is taken.

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
        """Whether levels follow from what ranks measure."""
        return self._schedule is not None

    @property
    def levels(self) -> tuple[float, ...]:
        """Every ratio that a step can have, largest first."""
        usual = self._config.ratio
        ratios = {DENSE, usual, *(ratio for _, ratio in self._stretches)}
        if self._schedule is not None:
            ratios |= {*self._schedule.ratios(usual)}
        return tuple(sorted(ratios, reverse=True))

    @property
    def ratio_after_warmup(self) -> float:
        """The ratio where nothing is decided yet."""
        usual = self._config.ratio
        return usual if self._schedule is None else self._schedule.first(usual)

    def ratio_at(self, committed: int, decision: Decision = ()) -> float:
        """That of the step after so many committed ones."""
        after = decision[0] if decision else self.ratio_after_warmup
        return next((r for until, r in self._stretches if committed < until), after)

    def decide(self, before: Decision, level: float, heard: Heard | None) -> Decision:
        """What is decided at the end of a committed step.

        Args:
            before: what was decided last.
            level: the ratio of the step.
            heard: what ranks told each other in it; None: not known, which changes nothing.
        """
        if self._schedule is None or heard is None:
            return before
        decision = self._schedule.decide(before, level, self._config.ratio, heard)
        assert decision[0] in self.levels
        assert len(decision) <= MEMORY + 1
        return decision

    def usable(self, saved: Sequence[float]) -> Decision:
        """What a checkpoint or another rank has decided, if its level is one here."""
        if not saved or not self.decides:
            return ()
        if saved[0] in self.levels:
            return tuple(saved)
        log.warning("TopKEF: the checkpoint's level %s is no ratio of this optimizer's", saved[0])
        return ()

    def check(self, ratio: float) -> None:
        """Refuse a ratio that is no level, and 1.0 where it would not send all.

        Raises:
            ConfigError: it is none, or does not.
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
                cure="Pass a ratio below 1 when the optimizer is built: the others are dense with "
                "ratios={'*': 'dense'}",
            )

    def level(self, saved: float | None, otherwise: float | None) -> float | None:
        """The ratio that a checkpoint says was asked for, if it is a level here."""
        if saved is None:
            return otherwise
        if saved in self.levels:
            return saved
        log.warning("TopKEF: the checkpoint's set_ratio(%s) is no ratio of this optimizer's", saved)
        return otherwise

    def settings(self, ratio: float, *, corrects: bool = True) -> Method:
        """The settings at a ratio level.

        corrects: whether a momentum that is corrected still is.
        """
        settings = self._config.at(ratio)
        profile = {} if self._schedule is None else self._schedule.profile(ratio)
        if not corrects:
            profile |= {"momentum": 0.0, "nesterov": False, "taken_over": False}
        return replace(settings, **profile) if profile else settings

    def _check_profiles(self, schedule: schedules.Schedule) -> None:
        """Refuse profiles of ratios that have none, and settings that no level can change."""
        common = {each.name for each in fields(Settings)} - PROFILED
        allowed = {each.name for each in fields(self._config)} - common - {"ratio"}
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
            self.settings(ratio)  # whose values are checked

    def label(self, ratio: float) -> str:
        """What a level adds to the names of collectives; nothing for the usual one.

        Made of what TensorFlow takes in a name, so that ranks of both frameworks meet.
        """
        return "" if ratio == self._config.ratio else f"-{ratio!r}"
