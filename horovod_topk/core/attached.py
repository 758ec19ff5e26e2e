"""What `TopKEF.of(...)` returns in every framework: questions to the state behind one optimizer.

An optimizer that exchanges nothing, as in one process, has no state: it is not `active`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, Protocol, SupportsFloat, TypeVar

from horovod_topk.core.base_compressor import check_all_exchange, check_kept, why_inactive
from horovod_topk.core.plan import Plan
from horovod_topk.core.schedule import Clock
from horovod_topk.core.state import State
from horovod_topk.core.stats import Stats, StepCounters

log = logging.getLogger("horovod_topk")

Kept = TypeVar("Kept", bound=State[Any])


class Manager(Protocol):
    """What keeps the state through an elastic job: `horovod_topk.elastic.Manager`."""

    units: int  # ranks that residuals are of; 0: not known yet
    clock: Clock

    def settle(self) -> None:
        """Meet the other ranks after ranks have come or gone. A collective."""
        ...

    def counted(self, stats: Stats) -> Stats:
        """Statistics with what was lost."""
        ...


class Attached(Generic[Kept]):
    """Error feedback behind one optimizer, or behind the tapes of one list of variables.

    Args:
        process_set: Horovod's, of the ranks that exchange.
        reduction: "average" or "sum" over ranks.
        label: what to call it in messages.
    """

    framework: str
    _state: Kept  # where it is active
    warnings: Sequence[str] = ()  # what was warned of for this optimizer, as in the log

    def __init__(self, process_set: Any, reduction: str, label: str) -> None:
        self._process_set, self._reduction, self.label = process_set, reduction, label
        self._skipped: dict[str, str] = {}
        self._late: Counter[str] = Counter()  # steps that tensors have held their bucket back
        self.manager: Manager | None = None  # in an elastic job whose state has this
        reason = why_inactive(process_set)
        self.active = reason is None
        if reason is not None:
            self._skip("*", reason)

    def _stand_for_nothing(self, label: str, reason: str) -> None:
        """Be inactive from the beginning, for a reason; in the place of `__init__`."""
        self.label, self.active, self._skipped = label, False, {"*": reason}
        self._late, self.manager, self._reduction = Counter(), None, "average"

    def stats(self) -> Stats:
        """Totals and norms so far. Waits for the device; call it on any rank, it is local."""
        stats = self._state.stats() if self.active else Stats()
        skipped, late = dict(self._skipped), dict(self._late)
        warnings = *self.warnings, *stats.warnings
        stats = replace(stats, skipped=skipped, late=late, warnings=warnings)
        return stats if self.manager is None else self.manager.counted(stats)

    @property
    def reduction(self) -> str:
        """What is applied: the "average" or the "sum" over ranks."""
        return self._reduction

    @property
    def tensors(self) -> dict[str, list[int]]:
        """Shapes of the gradients that are compressed, by name, as far as they are known."""
        if not self.active:
            return {}
        return {name: list(spec.shape) for name, spec in self._state.specs().items()}

    @property
    def agreed(self) -> Plan | None:
        """The plan that all ranks have to have in common; None: no tensor is known yet."""
        return self._state.agreed if self.active else None

    @property
    def steps(self) -> int:
        """How many steps have ended, committed or rolled back, with those before a checkpoint.

        As many on every rank.
        """
        return self._state.ended if self.active else 0

    @property
    def ratio(self) -> float:
        """Share of each tensor's elements that a step sends that begins now; see `set_ratio`."""
        return self._state.ratio if self.active else 1.0

    def set_ratio(self, ratio: float | None) -> None:
        """Send another share of elements from the next step on; None: what the settings say.

        Call it on every rank, between the same two steps. A step at 1.0 sends all residuals, at
        full precision, and leaves zeros.

        Args:
            ratio: 1.0, `ratio` of the settings, or a ratio that `warmup` names.

        Raises:
            ConfigError: it is none of these, or ranks that join later would not hear of it. In
                TensorFlow also where a tf.function was traced for one ratio alone: without
                `warmup`, `set_ratio(None)` has to come before it.
        """
        if self.active:
            check_kept(self.manager, f"set_ratio({ratio!r}) was called, of which")
            self._state.set_ratio(ratio)

    def report(self, value: SupportsFloat) -> None:
        """Report how training goes, such as this rank's loss, for the guard's rule `trend`.

        A tensor on an accelerator is waited for. `horovod_topk.report` does this for all optimizers
        of the process.

        Args:
            value: the smaller, the better.
        """
        if self.active:
            self._state.guard.report(float(value))

    @property
    def clock(self) -> Clock:
        """What the ratio of the next step follows from: committed steps, and what was asked for."""
        return self._state.clock if self.active else Clock(0)

    def resume(self, clock: Clock, ranks: int) -> None:
        """Go on where an elastic job is, whose ranks are so many; called by its manager."""
        if self.active:
            self._state.resume(clock, ranks)

    def keep_with(self, manager: Manager) -> None:
        """Take part in an elastic job; called by `TopKEF`.

        Raises:
            ConfigError: not all ranks exchange these gradients.
        """
        check_all_exchange(self._process_set)
        self.manager = manager
        if manager.units:
            self.resume(manager.clock, manager.units)

    @property
    def place(self) -> tuple[int, int]:
        """This rank, and of how many that exchange."""
        return self._state.place if self.active else (0, 1)

    def state_dict(self) -> dict[str, Any]:
        """Copies of this rank's committed residuals, flat, by tensor name. Empty if inactive.

        Every rank has its own: save one file a rank.
        """
        return self._state.state_dict() if self.active else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take on residuals that this rank saved; a step under way is dropped.

        In PyTorch, gradients have to be made again after `backward()`: call `zero_grad()` before
        the next. In TensorFlow, residuals wait for the first step where there was none.

        Raises:
            StateDictError: a tensor is missing, unknown or of another shape; nothing has changed.
        """
        if self.active:
            self._state.load_state_dict(state)

    def reset(self) -> None:
        """Set all residuals to zero; a step under way is dropped. Call it on every rank."""
        if self.active:
            self._state.reset()

    def residual(self, name: str) -> Any:
        """A copy of one tensor's committed residual, flat, float32 (float64 for a float64 one).

        Raises:
            KeyError: no such tensor is compressed.
        """
        if not self.active:
            raise KeyError(name)
        return self._state.residual(name)

    def on_step(self, callback: Callable[[StepCounters], None]) -> None:
        """Call `callback` at the end of every step with counters, in the thread that runs it.

        No device is waited for.
        """
        if self.active:
            self._state.on_step(callback)

    def _skip(self, name: str, reason: str) -> None:
        self._skipped[name] = reason
        log.warning("TopKEF does not compress %s: %s", name, reason)
