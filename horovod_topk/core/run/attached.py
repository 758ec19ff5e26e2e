"""`Attached`: base of the objects that `TopKEF.of(...)` returns in every framework.

Its methods forward to the state of one optimizer, or to those of a model's several optimizers. An
optimizer that exchanges nothing, as in one process, has no state: it is not `active`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, SupportsFloat, TypeVar, cast

from horovod_topk.config import check_whole
from horovod_topk.core.control.schedule import Clock
from horovod_topk.core.exchange.membership import check_all_exchange, check_kept, why_inactive
from horovod_topk.core.plan.buckets import Plan
from horovod_topk.core.run.state import State
from horovod_topk.core.run.stats import Stats, StepCounters, in_all, measured
from horovod_topk.core.run.substitute import VARIABLE
from horovod_topk.core.state.residual import Squares
from horovod_topk.core.state.state_dict import of_several, shared_out
from horovod_topk.reporting import number_of

log = logging.getLogger("horovod_topk")

Kept = TypeVar("Kept", bound=State[Any])


class Attached(Generic[Kept]):
    """Error feedback of one optimizer, or of the gradient tapes of one list of variables.

    A model under DistributedDataParallel may have several optimizers, each with a state of its own.

    Args:
        process_set: Horovod's process set of the ranks that exchange gradients; None: this rank
            exchanges, also if it is alone.
        reduction: "average" or "sum" over ranks.
        reason: why nothing is compressed, if it is known before.
    """

    framework: str  # "torch" or "tensorflow"
    part: str = ""  # which shard of all gradients this rank has, for names of files
    _state: Kept  # set if it is active
    warnings: Sequence[str] = ()  # warnings for this optimizer, as in the log

    def __init__(self, process_set: Any, reduction: str, label: str, reason: str = "") -> None:
        self._process_set, self._reduction, self.label = process_set, reduction, label
        self._skipped = {"*": reason} if reason else {}
        self._late: Counter[str] = Counter()  # tensor -> steps in which it delayed its bucket
        self.manager: Any = None  # `horovod_topk.elastic.Manager` that keeps residuals, if any
        if process_set is not None and not reason and (why := why_inactive(process_set)):
            self._skip("*", why)
        self.active = not self._skipped

    @property
    def _states(self) -> Sequence[Kept]:
        """The state of each optimizer that exchanges gradients."""
        return (self._state,) if self.active else ()

    def stats(self) -> Stats:
        """Totals and norms so far. Waits for the device; call it on any rank, it is local.

        With several optimizers, steps and bytes are the sums over them (`core.run.stats.in_all`).
        """
        stats = Stats()
        if self.active:
            stats = in_all([state.stats() for state in self._states])
        if self.active and len(self._states) > 1:
            squares = sum((state.squares() for state in self._states), Squares())
            stats = replace(stats, **measured(squares))
        skipped, late = dict(self._skipped), dict(self._late)
        warnings = *self.warnings, *stats.warnings
        stats = replace(stats, skipped=skipped, late=late, warnings=warnings)
        return stats if self.manager is None else cast("Stats", self.manager.counted(stats))

    @property
    def reduction(self) -> str:
        """Whether ranks' gradients are combined by "average" or "sum"."""
        return self._reduction

    @property
    def residual_reduction(self) -> str:
        """As `reduction`, by which residuals are rescaled when ranks join or leave."""
        return self._reduction

    @property
    def tensors(self) -> dict[str, list[int]]:
        """Shapes of the compressed gradients that are known so far, by name."""
        specs = (spec for state in self._states for spec in state.specs().items())
        return {name: list(spec.shape) for name, spec in specs}

    @property
    def agreed(self) -> Plan | None:
        """The plan that has to be equal on all ranks; None: no tensor is known yet."""
        return self._state.agreed if self.active else None

    @property
    def steps(self) -> int:
        """Number of ended steps, committed or rolled back, including those before a checkpoint.

        It is equal on all ranks. With several optimizers it is the sum of their steps.
        """
        return sum(state.ended for state in self._states)

    @property
    def ratio(self) -> float:
        """Share of each tensor's elements that the next step sends; see `set_ratio`."""
        return max((state.ratio for state in self._states), default=1.0)

    def set_ratio(self, ratio: float | None) -> None:
        """Send another share of elements from the next step on; None: the share of the settings.

        Call it on every rank, between the same two steps. A step at 1.0 sends all residuals, at
        full precision, and leaves zeros.

        Args:
            ratio: 1.0, `ratio` of the settings, or a ratio that `warmup` names.

        Raises:
            ConfigError: `ratio` is none of these, or ranks that join later would not know it. In
                TensorFlow also if a tf.function was traced for one ratio only: without `warmup`,
                call `set_ratio(None)` before it is traced.
        """
        if self.active:
            check_kept(self.manager, f"set_ratio({ratio!r}) was called, of which")
        for state in self._states:
            if ratio is not None:
                state.schedule.check(ratio)
        for state in self._states:
            state.set_ratio(ratio)

    def probe(self, every: int | None) -> None:
        """Exchange a bucket dense beside compressed in one step of `every`, each bucket in turn.

        `stats()` and `on_step` report the difference of the two (`core.exchange.probe`). Call it on
        every rank, between the same two steps.

        Args:
            every: steps from one probe to the next; None: probe no more.

        Raises:
            ConfigError: `every` is no whole number above 0, or this is TensorFlow, which has no
                probe.
        """
        if every is not None:
            every = check_whole("every", every, 1, 2**31, 100)
        for state in self._states:
            state.probe_every(every)

    def report(self, value: SupportsFloat) -> None:
        """Report a value such as this rank's loss to the guard's rule `trend`.

        It waits for a tensor on an accelerator. `horovod_topk.report` does this for all optimizers
        of the process.

        Args:
            value: lower values have to be better.

        Raises:
            ConfigError: `value` is not one number.
        """
        for state in self._states:
            state.guard.report(number_of(value))

    @property
    def clock(self) -> Clock:
        """Committed steps, requested ratio, decision and guard: they give the next step's ratio."""
        return self._state.clock if self.active else Clock(0)

    def resume(self, clock: Clock, ranks: int) -> None:
        """Load the clock of an elastic job with `ranks` ranks; called by its manager."""
        if self.active:
            self._state.resume(clock, ranks)

    def shared_state(self) -> dict[str, Any]:
        """The method's state that is equal on all ranks, for ranks that join an elastic job."""
        return self._state.shared_state() if self.active else {}

    def take_shared(self, state: Mapping[str, Any]) -> None:
        """Load the `shared_state` of another rank; a step under way is dropped."""
        if self.active:
            self._state.take_shared(state)

    def keep_with(self, manager: Any) -> None:
        """Have an `elastic.Manager` keep residuals through an elastic job; called by `TopKEF`."""
        check_all_exchange(self._process_set)
        self.manager = manager
        if self.active:
            self._state.states_facts = True
        if manager.units:
            self.resume(manager.clock, manager.units)
            self.take_shared(manager.shared)

    @property
    def rank_and_ranks(self) -> tuple[int, int]:
        """This rank, and the number of ranks that exchange gradients."""
        return self._state.rank_and_ranks if self.active else (0, 1)

    def state_dict(self) -> dict[str, Any]:
        """Copies of this rank's committed residuals, flat, by tensor name. Empty if inactive.

        Every rank has its own: save one file a rank.
        """
        return of_several([(state.state_dict(), state.ended) for state in self._states])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load residuals that this rank saved; a step under way is dropped.

        In PyTorch, gradients have to be computed again if `backward()` was called: call
        `zero_grad()` before the next one. In TensorFlow, a state dict that is loaded before the
        first step takes effect in that step.

        Raises:
            StateDictError: a tensor is missing, unknown or of another shape; nothing has changed.
        """
        if not self.active:
            return
        parts = shared_out(state, [each.specs().keys() for each in self._states])
        pairs = list(zip(self._states, parts, strict=True))
        for each, part in pairs[:-1]:  # loading checks the last one, or the only one
            each.check_state_dict(part)
        for each, part in reversed(pairs):
            each.load_state_dict(part)

    def reset(self) -> None:
        """Set all residuals and velocities to zero; a step under way is dropped.

        Call it on every rank, or gradients that other ranks hold back still come. How often
        elements arrive and how large the learning rate has been is not forgotten.
        """
        for state in self._states:
            state.reset()

    def forget(self) -> None:
        """Set the whole state to zero, for ranks that join an elastic job; drop an open step."""
        for state in self._states:
            state.forget()

    def residual(self, name: str) -> Any:
        """A copy of one tensor's committed residual, flat, float32 (float64 for float64 gradients).

        Raises:
            KeyError: no such tensor is compressed.
        """
        if not self.active:
            raise KeyError(name)
        *others, last = self._states
        return next((each for each in others if name in each.specs()), last).residual(name)

    def on_step(self, callback: Callable[[StepCounters], None]) -> None:
        """Call `callback` with counters at the end of every step, in the thread that runs the step.

        No device is waited for. With several optimizers it is called at the end of each one's step.
        """
        for state in self._states:
            state.on_step(callback)

    def _skip(self, name: str, reason: str) -> None:
        self._skipped[name] = reason
        what = "anything" if name == "*" else repr(name)
        log.warning("TopKEF does not compress %s: %s", what, reason)


class ByHorovod(Attached[Any]):
    """The inactive state of an optimizer whose gradients Horovod's own compression exchanges.

    An environment variable selects it (`core.run.substitute`). A script that reads statistics or
    saves residuals still has to run.

    Args:
        name: Horovod's compression, "none" or "fp16".
    """

    def __init__(self, name: str, framework: str) -> None:
        self.framework = framework
        reason = f"{VARIABLE}={name}: gradients are exchanged without this package"
        super().__init__(None, "average", f"the exchange {name!r}", reason)


class Forwarded:
    """A method or property of `Attached` that a compressor has, for the one optimizer that uses it.

    A compressor's class has the documentation of `Attached`.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, compressor: Any, owner: type) -> Any:
        of = Attached if compressor is None else compressor.behind
        return getattr(of, self._name)
