"""`Counting` counts one optimizer's steps, bytes and seconds, and reports them to users."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Generic, TypeVar

from horovod_topk.core.exchange.probe import Probed
from horovod_topk.core.exchange.protocol import Exchange, Traffic
from horovod_topk.core.plan.buckets import Plan
from horovod_topk.core.run.stats import NormSample, StepCounters, stored_bytes
from horovod_topk.core.run.timing import Seconds
from horovod_topk.core.state.named_state import NamedState
from horovod_topk.core.state.residual import Squares
from horovod_topk.errors import ConfigError

Array = TypeVar("Array")


class Counting(Generic[Array]):
    """Counts the steps of one optimizer: the part of `State` that adapters call after each step.

    Attributes:
        steps, rolled_back: number of committed steps, and of steps that were rolled back.
        unapplied: number of steps that were rolled back without a NaN or an infinity.
        position: the optimizer's, in the list of a model's optimizers.
    """

    def __init__(self) -> None:
        self.plan: Plan | None = None  # of the last step; None: no tensor is known yet
        self.exchange: Exchange[Array] | None = None  # None: it is not selected yet
        self.parts: dict[str, NamedState[Array]] = {}
        self.steps = self.rolled_back = self.unapplied = 0
        self.sent_bytes = self.dense_bytes = 0  # of all these steps, as in `Stats`
        self.seconds, self.sample = Seconds(), NormSample()  # of all; of the last that was sampled
        self._counted: tuple[Plan, int] | None = None  # a plan, and the bytes of memory it takes
        self._begun = 0  # what a loaded checkpoint adds to the number of ended steps
        self.callbacks: list[Callable[[StepCounters], None]] = []
        self.position = 0

    def squares(self) -> Squares:
        """Sums of squares of the gradients and residuals of the last step. Waits for the device."""
        raise NotImplementedError

    def norm(self, key: str) -> float:
        """Euclidean norm of one part of the state; 0 if there is none. Waits for the device."""
        return self.parts[key].norm() if key in self.parts else 0.0

    @property
    def ended(self) -> int:
        """Steps that have ended, committed or rolled back, including those before a checkpoint."""
        return self._begun + self.steps + self.rolled_back

    def on_step(self, callback: Callable[[StepCounters], None]) -> None:
        """Call `callback` at the end of every step, committed or rolled back."""
        if not callable(callback):
            raise ConfigError(
                f"on_step() was given {callback!r}",
                cure="Pass a function of one argument, a StepCounters",
            )
        self.callbacks.append(callback)

    def end_step(
        self,
        traffic: Traffic,
        flagged: Collection[str],
        *,
        committed: bool,
        seconds: Seconds = Seconds(),  # noqa: B008  # it is frozen
        fell_back: str = "",
    ) -> None:
        """Count a step that has ended, and call the callbacks.

        fell_back: the guard's rule that ends compression with this step; empty: none does.
        """
        self.steps += committed
        self.rolled_back += not committed
        self.unapplied += not (committed or flagged)
        self.seconds += seconds
        self.sent_bytes += traffic.sent_bytes
        self.dense_bytes += traffic.dense_bytes
        if not self.callbacks:
            return
        assert self.plan is not None  # of the step
        counters = StepCounters(
            self.ended,
            committed,
            **vars(traffic),
            flagged=tuple(flagged),
            level=self.plan.config.ratio,
            **vars(seconds),
            **vars(self.sample),
            **vars(self.probed),
            memory_bytes=self.memory_bytes,
            fell_back=fell_back,
            optimizer=self.position,
        )
        for callback in self.callbacks:
            callback(counters)

    @property
    def probed(self) -> Probed:
        """Result of the last probe."""
        return Probed()

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that compression takes on this rank; computed once for each plan."""
        plan, exchange = self.plan, self.exchange
        assert plan is not None
        assert exchange is not None
        if self._counted is None or self._counted[0] is not plan:
            stored = sum(map(stored_bytes, self.parts.values()))
            self._counted = plan, stored + exchange.buffer_bytes(plan)
        return self._counted[1]
