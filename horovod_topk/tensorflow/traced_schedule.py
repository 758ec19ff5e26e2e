"""Ratios that change from step to step inside traced graphs, which have a branch for each.

`core.control.schedule` determines the ratio of each step. In eager mode a step looks it up. A
tf.function is traced before its steps run: it gets a branch for every ratio level, and variables
such as the number of committed steps choose the branch when it runs. All branches share the same
residuals, whose layout does not depend on the ratio.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from horovod_topk.core.control import guard
from horovod_topk.core.control.schedule import Decision, Schedule, chosen
from horovod_topk.core.exchange.membership import elastic
from horovod_topk.core.plan.facts import PRIME, START, pack, with_ratio
from horovod_topk.errors import ConfigError
from horovod_topk.methods.protocol import Method
from horovod_topk.tensorflow.variables import own_variable


class TracedSchedule:
    """`core.control.schedule.Counter` in variables, which choose the branch of a graph."""

    def __init__(self, config: Method) -> None:
        self._config, self._schedule = config, Schedule(config)
        may_change = config.warmup is not None or config.guard is not None
        dynamic = may_change or self._schedule.decides
        self._in_traces = dynamic  # whether traces have all levels
        self._one_traced = False  # whether a trace has only one level
        self._committed = own_variable(0, dtype=tf.int64)
        self._asked, self._decided = (own_variable(-1, dtype=tf.int32) for _ in range(2))  # levels
        self._stage = own_variable(guard.COMPRESSING, dtype=tf.int32)
        self._lineage = own_variable(START, dtype=tf.int64)
        self._decision: Decision = ()

    @property
    def committed(self) -> int:
        """Number of committed steps, including those of a loaded state."""
        return int(self._committed)

    @committed.setter
    def committed(self, committed: int) -> None:
        self._committed.assign(committed)

    @property
    def asked(self) -> float | None:
        """The ratio that a user asked for; None: no ratio was asked for."""
        asked = int(self._asked) if self._in_traces else -1
        return None if asked < 0 else self._schedule.levels[asked]

    @asked.setter
    def asked(self, ratio: float | None) -> None:
        """Use a level from the next step on, or go back to the schedule (None).

        Raises:
            ConfigError: the job is elastic, or a tf.function was traced for one level only.
        """
        if elastic():
            raise ConfigError(
                f"set_ratio({ratio!r}) was called, and ranks that join an elastic job do not hear "
                "of it",
                cure="Run without --min-np and --max-np",
            )
        if self._one_traced:
            raise ConfigError(
                f"set_ratio({ratio!r}) was called, and a tf.function was traced for ratio "
                f"{self._config.ratio} alone",
                cure="Call set_ratio(None) of the TopKEF(...) before the first step, or pass "
                "warmup=: traces have a branch for every ratio then. Now, load this state_dict() "
                "into a TopKEF of the ratio wanted, of a new optimizer or tape",
            )
        self._in_traces = True
        self._asked.assign(-1 if ratio is None else self._schedule.levels.index(ratio))

    @property
    def decision(self) -> Decision:
        """The schedule's last decision, with its memory."""
        return self._decision

    @decision.setter
    def decision(self, decision: Decision) -> None:
        self._decision = decision
        if self._schedule.decides:
            self._decided.assign(self.decided)

    @property
    def decided(self) -> int:
        """Position of the level that the schedule has decided on; -1: no decision."""
        return self._schedule.levels.index(self._decision[0]) if self._decision else -1

    @property
    def lineage(self) -> int:
        """Digest of what was loaded, reset or left out of a step."""
        return int(self._lineage)

    @lineage.setter
    def lineage(self, digest: int) -> None:
        self._lineage.assign(digest)

    def facts(self, ratio: float, rate: Any, allocated: int) -> Any:
        """Facts of a step in a graph, [4] uint8, the lowest byte first; see `core.plan.facts`.

        allocated: digest of the allocation that the graph is built for.
        """
        rates = 0 if rate is None else tf.bitcast(rate, tf.int64) % PRIME
        asked = tf.cast(self._asked.read_value(), tf.int64)
        state = with_ratio(self._lineage.read_value() + allocated, asked)
        number = pack(self.read(), self._schedule.below_usual(ratio), state, rates)
        return tf.bitcast(tf.cast(number, tf.uint32), tf.uint8)

    def enter(self, stage: Any) -> None:
        """Enter a stage of the guard: a number of `core.control.guard`, or [] int32."""
        if self._config.guard is not None:
            self._stage.assign(stage)

    def take(self, level: Any) -> None:
        """Store in a graph the position of the level that was decided on, [] int32."""
        if self._schedule.decides:
            self._decided.assign(level)

    def traced(self, build: Callable[[float], Any]) -> Any:
        """Build a graph with a branch for each ratio; return the result of the chosen one."""
        if not self._in_traces:
            self._one_traced = True
            return build(self._config.ratio)
        levels = self._schedule.levels
        return tf.switch_case(self._position(), [lambda r=r: build(r) for r in levels])

    def read(self) -> Any:
        """Number of committed steps before this one, in a graph: [] int64."""
        return self._committed.read_value()

    def count(self) -> None:
        """Count a committed step, in a graph."""
        self._committed.assign_add(1)

    def _position(self) -> Any:
        """Position of the next step's level, in a graph."""
        schedule, has_ended = self._schedule, False
        if self._config.guard is not None:
            has_ended = tf.not_equal(self._stage.read_value(), guard.COMPRESSING)
        decided = self._decided.read_value() if schedule.decides else -1
        known = self._committed.read_value(), decided, self._asked.read_value()
        return schedule.level_of(*known, has_ended=has_ended, where=_where)


def _where(condition: Any, this: Any, other: Any) -> Any:
    """`tf.where`, without an operation if the condition is known when the graph is traced."""
    if isinstance(condition, bool):
        return chosen(condition, this, other)
    return tf.where(condition, this, other)
