"""Ratios that change from step to step, in graphs that do not.

`horovod_topk.core.schedule` says which ratio each step has. In eager mode a step looks it up. A
tf.function is traced before its steps are taken: it gets a branch for every rung, and a variable
that counts the steps chooses one when it runs. Branches share the residuals, which lie where they
lie whatever the ratio.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from horovod_topk.config import TopKConfig
from horovod_topk.core.front import elastic
from horovod_topk.core.schedule import Schedule
from horovod_topk.errors import ConfigError
from horovod_topk.tensorflow.residuals import apart


class Rungs:
    """Of one state: which there are, and which the next step takes.

    Args:
        config: of every rank.
    """

    def __init__(self, config: TopKConfig) -> None:
        self._config, self.schedule = config, Schedule(config)
        self._stretches = config.stretches
        self._in_traces = config.warmup is not None  # whether traces have all rungs
        self._one_traced = False  # whether a trace has one rung alone
        self._committed, self._asked = apart(_variables)

    @property
    def ratio(self) -> float:
        """That of a step that begins now."""
        asked = self.asked
        return self._usual() if asked is None else asked

    @property
    def committed(self) -> int | None:
        """How many steps were committed, with those of a loaded state; None if nobody asks."""
        return None if self._config.warmup is None else int(self._committed)

    @property
    def asked(self) -> float | None:
        """What was asked for, if anything was."""
        asked = int(self._asked) if self._in_traces else -1
        return None if asked < 0 else self.schedule.levels[asked]

    def go_on_at(self, saved: float | None) -> None:
        """Ask for the ratio that a checkpoint says was asked for.

        Raises:
            ConfigError: a tf.function was traced for another one alone.
        """
        rung = self.schedule.level(saved, self.asked)
        if rung != self.asked:
            self.ask(rung)

    def go_on_from(self, committed: int) -> None:
        """Set the number of committed steps."""
        self._committed.assign(committed)

    def ask(self, ratio: float | None) -> None:
        """Take a rung from the next step on, or go back to the schedule (None).

        Raises:
            ConfigError: it is no rung, the job is elastic, or a tf.function was traced before
                anyone asked.
        """
        if elastic():
            raise ConfigError(
                f"set_ratio({ratio!r}) was called, and ranks that join an elastic job do not hear "
                "of it",
                cure="Run without --min-np and --max-np",
            )
        if ratio is not None:
            self.schedule.check(ratio)
        if self._one_traced:
            raise ConfigError(
                f"set_ratio({ratio!r}) was called, and a tf.function was traced for ratio "
                f"{self._config.ratio} alone",
                cure="Call set_ratio(None) of the TopKEF(...) before the first step, or pass "
                "warmup=: traces have a branch for every ratio then. Now, load this state_dict() "
                "into a TopKEF of the ratio wanted, of a new optimizer or tape",
            )
        self._in_traces = True
        self._asked.assign(-1 if ratio is None else self.schedule.levels.index(ratio))

    def traced(self, build: Callable[[float], Any]) -> Any:
        """What `build` adds to a graph for the ratio that a run of it has; the same for each."""
        if not self._in_traces:
            self._one_traced = True
            return build(self._config.ratio)
        rungs = self.schedule.levels
        return tf.switch_case(self._position(), [lambda r=r: build(r) for r in rungs])

    def counted(self) -> list[tuple[Any, Any]]:
        """What a commit assigns besides residuals: variables and their new values."""
        return [] if self._config.warmup is None else [(self._committed, self._committed + 1)]

    def _usual(self) -> float:
        return self.schedule.ratio_at(int(self._committed) if self._stretches else 0)

    def _position(self) -> Any:
        """Which of the rungs, in a graph."""
        rungs, committed = self.schedule.levels, self._committed.read_value()
        usual: Any = tf.constant(rungs.index(self._config.ratio))
        for until, ratio in reversed(self._stretches):
            usual = tf.where(committed < until, rungs.index(ratio), usual)
        asked = self._asked.read_value()
        return tf.where(asked < 0, usual, asked)


def _variables() -> tuple[Any, Any]:
    """Committed steps, and which rung was asked for, if not -1."""
    with tf.device("cpu"):
        return tf.Variable(0, False, dtype=tf.int64), tf.Variable(-1, False, dtype=tf.int32)
