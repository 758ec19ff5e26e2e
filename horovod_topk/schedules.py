"""Schedules: what decides the ratio level of each step from what all ranks have measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

Decision = tuple[float, ...]  # a ratio level, and then what the schedule remembers; (): nothing yet
MEMORY = 31  # numbers that a schedule may remember


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Base of schedules that decide the ratio level of each step: pass one as `schedule=`.

    Every rank decides alike, without a collective: `decide` is given the same numbers everywhere,
    and has to return the same for the same. Subclasses are frozen dataclasses, whose fields are the
    settings that ranks agree on.
    """

    measures: ClassVar[tuple[str, ...]] = ()  # see `horovod_topk.core.measures`

    def ratios(self, usual: float) -> tuple[float, ...]:
        """Levels that a step may have besides 1.0 and `usual`, the ratio of the settings."""
        return ()

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
