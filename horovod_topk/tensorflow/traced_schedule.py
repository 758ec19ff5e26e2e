"""Ratios that change from step to step, in graphs that do not.

`horovod_topk.core.schedule` says which ratio each step has. In eager mode a step looks it up. A
tf.function is traced before its steps are taken: it gets a branch for every ratio level, and a
variable that counts the steps chooses one when it runs. Branches share the residuals, which lie
where they lie whatever the ratio.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from horovod_topk.core.base_compressor import elastic
from horovod_topk.core.schedule import DENSE, Decision, Schedule
from horovod_topk.errors import ConfigError
from horovod_topk.methods.protocol import Method
from horovod_topk.tensorflow.variables import apart


class TracedSchedule:
    """`horovod_topk.core.schedule.Counter` in variables, and the branch that a graph takes by it.

    Args:
        config: of every rank.
    """

    def __init__(self, config: Method) -> None:
        self._config, self._schedule = config, Schedule(config)
        may_change = config.warmup is not None or config.guard is not None
        dynamic = may_change or self._schedule.decides
        self._in_traces = dynamic  # whether traces have all levels
        self._one_traced = False  # whether a trace has one level alone
        self._committed, self._asked, self._decided, self._dense = apart(_variables)
        self._decision: Decision = ()

    @property
    def committed(self) -> int:
        """How many steps were committed, with those of a loaded state."""
        return int(self._committed)

    @committed.setter
    def committed(self, committed: int) -> None:
        self._committed.assign(committed)

    @property
    def asked(self) -> float | None:
        """The ratio that was asked for, if one was."""
        asked = int(self._asked) if self._in_traces else -1
        return None if asked < 0 else self._schedule.levels[asked]

    @asked.setter
    def asked(self, ratio: float | None) -> None:
        """Take a level from the next step on, or go back to the schedule (None).

        Raises:
            ConfigError: the job is elastic, or a tf.function was traced before anyone asked.
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
        """What the schedule decided last, and remembers."""
        return self._decision

    @decision.setter
    def decision(self, decision: Decision) -> None:
        self._decision = decision
        if self._schedule.decides:
            self._decided.assign(self.decided)

    @property
    def decided(self) -> int:
        """The position of the level that was decided on; -1: of none."""
        return self._schedule.levels.index(self._decision[0]) if self._decision else -1

    def fall_back(self, is_over: Any) -> None:
        """Have steps at the dense level alone, or as decided: a bool, or [] bool in a graph."""
        if self._config.guard is not None:
            self._dense.assign(is_over)

    def take(self, level: Any) -> None:
        """Note in a graph what was decided while it runs: the position of a level, [] int32."""
        if self._schedule.decides:
            self._decided.assign(level)

    def traced(self, build: Callable[[float], Any]) -> Any:
        """What `build` adds to a graph for the ratio that a run of it has; the same for each."""
        if not self._in_traces:
            self._one_traced = True
            return build(self._config.ratio)
        levels = self._schedule.levels
        return tf.switch_case(self._position(), [lambda r=r: build(r) for r in levels])

    def read(self) -> Any:
        """How many steps were committed before this one, in a graph: [] int64."""
        return self._committed.read_value()

    def count(self) -> None:
        """Count a committed step, in a graph."""
        self._committed.assign_add(1)

    def _position(self) -> Any:
        """Index of the level of a step that begins now, in a graph."""
        levels, committed = self._schedule.levels, self._committed.read_value()
        usual: Any = tf.constant(levels.index(self._schedule.ratio_after_warmup))
        if self._schedule.decides:
            decided = self._decided.read_value()
            usual = tf.where(decided < 0, usual, decided)
        for until, ratio in reversed(self._config.stretches):
            usual = tf.where(committed < until, levels.index(ratio), usual)
        asked = self._asked.read_value()
        chosen = tf.where(asked < 0, usual, asked)
        if self._config.guard is None:
            return chosen
        return tf.where(self._dense.read_value(), levels.index(DENSE), chosen)


def _variables() -> tuple[Any, Any, Any, Any]:
    """Committed steps; what a user and the schedule asked for, if not -1; and the guard's end."""
    with tf.device("cpu"):
        asked, decided = (tf.Variable(-1, False, dtype=tf.int32) for _ in range(2))
        return tf.Variable(0, False, dtype=tf.int64), asked, decided, tf.Variable(False, False)
