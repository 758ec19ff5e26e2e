"""Which ratio each step has: one of a few ratio levels, fixed when the optimizer is built.

Deep Gradient Compression (Lin et al. 2018, section 3.3) begins with large ratios, as early
gradients change fast and are badly served by delay: `warmup` lists them. A step's level
follows from how many steps were committed, which every rank knows alike, unless the user asks for
another one on all ranks. Residuals stay where they are from level to level.

Dense (1.0) is always a level, at full precision and back from owners too: a step of it sends
all residuals and leaves zeros.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

from horovod_topk.errors import ConfigError
from horovod_topk.methods.protocol import Method

log = logging.getLogger("horovod_topk")

DENSE = 1.0


Clock = tuple[int, float | None]  # committed steps, and the ratio a user asked for, if one did


class Counter(Protocol):
    """What the ratio of the next step follows from."""

    committed: int  # steps, with those of a loaded state
    asked: float | None  # the ratio that a user asked for instead of the schedule's


@dataclass
class HostCounter:
    """`Counter` in plain numbers."""

    committed: int = 0
    asked: float | None = None


class Schedule:
    """The ratio levels of one optimizer's settings, and when each is taken."""

    def __init__(self, config: Method) -> None:
        self._config = config
        self._stretches = config.stretches

    @property
    def levels(self) -> tuple[float, ...]:
        """Every ratio that a step can have, largest first."""
        ratios = {DENSE, self._config.ratio, *(ratio for _, ratio in self._stretches)}
        return tuple(sorted(ratios, reverse=True))

    def ratio_at(self, committed: int) -> float:
        """That of the step after so many committed ones."""
        return next((r for until, r in self._stretches if committed < until), self._config.ratio)

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

    def settings(self, ratio: float) -> Method:
        """The settings at a ratio level."""
        return self._config.at(ratio)

    def label(self, ratio: float) -> str:
        """What a level adds to the names of collectives; nothing for the usual one.

        Made of what TensorFlow takes in a name, so that ranks of both frameworks meet.
        """
        return "" if ratio == self._config.ratio else f"-{ratio!r}"
