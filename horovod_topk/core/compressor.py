"""Error-feedback compression of one optimizer's gradients, bucket by bucket.

For each tensor on each rank, with residual e and gradient g (Stich 2018, Karimireddy 2019):

    compensate   a = e + g
    select       I = the k = ceil(ratio * n) indices with the largest |a|
    encode       p = encode(I, a[I])
    update       e = a - decode(p), pending until the step commits
    exchange     P = allgather(p)
    decode       g' = sum over ranks, in rank order, of decode(p_r), scaled

With momentum correction g is a velocity instead; see `horovod_topk.core.momentum`.

A step is: launch every bucket (in any order), finish every bucket, then commit or roll back. A
launch after a finish begins a new step, and rolls back one that nobody committed.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from horovod_topk.core.codec import PayloadCodec
from horovod_topk.core.exchange import Exchange, Traffic
from horovod_topk.core.momentum import Momentum
from horovod_topk.core.plan import BucketPlan, Plan
from horovod_topk.core.probe import Probe
from horovod_topk.core.rates import RATES, Rates, rates_of
from horovod_topk.core.reshard import rescaling
from horovod_topk.core.residual import (
    ASKED,
    COMMITTED,
    METHOD_STATE,
    SHARED,
    ResidualRegistry,
    asked_of,
    check_origin,
    check_owner,
    check_velocity,
    committed_of,
)
from horovod_topk.core.rounds import is_shared, state_names, state_plan
from horovod_topk.core.route import Route
from horovod_topk.core.schedule import Schedule
from horovod_topk.core.stats import Stats, StepCounters, count_step, planned
from horovod_topk.errors import GradientChangedError, NotLaunchedError, TopKError
from horovod_topk.ops import Ops

Array = TypeVar("Array")


class Phase(enum.Enum):
    """Where a bucket is within a step."""

    IDLE = "idle"
    SENT = "sent"  # launched, its gradients not yet replaced
    RECEIVED = "received"  # gradients replaced, candidate not yet committed


@dataclass
class Bucket(Generic[Array]):
    """One bucket's way and phase."""

    plan: BucketPlan
    route: Route[Array]
    probe: Probe[Array]
    phase: Phase = Phase.IDLE
    flagged: tuple[str, ...] = ()
    committed_last: bool = False  # whether the last launched step was committed
    measurable: bool = False  # whether arenas and payload still belong to one step


class Compressor(Generic[Array]):
    """The state of Top-K with error feedback behind one optimizer."""

    def __init__(
        self,
        plan: Plan,
        ops: Ops[Array],
        codec: PayloadCodec[Array],
        exchange: Exchange[Array],
        name: str,
    ) -> None:
        self.plan = plan
        self.registry = ResidualRegistry(plan, ops, exchange.holders)
        self.owned = ResidualRegistry(plan, ops, exchange.owned) if exchange.parts else None
        self.states = {  # TEMPORARY
            name: ResidualRegistry(plan, ops, lambda bucket, name=name: (state_plan(bucket, name),))  # type: ignore[misc]
            for name in state_names(plan.config, list(plan.tensors()))
        }
        self.momentum = Momentum(plan, ops) if plan.config.momentum else None
        self.rates: Rates | None = None  # that residuals follow, if they do
        self.name = name
        self.steps = 0
        self._schedule = Schedule(plan.config)
        self._asked: float | None = None  # by the user, instead of the schedule's
        self._committed = 0  # steps, with those of a loaded state: the schedule's clock
        self.units: int | None = None  # how many ranks these residuals are of, once there were any
        self.rolled_back = 0
        self._ops = ops
        self._codec = codec
        self._exchange = exchange
        self._callbacks: list[Callable[[StepCounters], None]] = []
        self._buckets = {b.ordinal: self._make_bucket(b) for b in plan.buckets}

    @property
    def is_under_way(self) -> bool:
        """Whether a bucket is launched and not yet finished."""
        return any(bucket.phase is Phase.SENT for bucket in self._buckets.values())

    def phase(self, ordinal: int) -> Phase:
        """Where a bucket is within a step."""
        return self._buckets[ordinal].phase

    def launch(self, ordinal: int, gradients: Sequence[Array]) -> None:
        """Compress a bucket and start its exchange. Writes no gradient and no residual.

        Args:
            ordinal: the bucket.
            gradients: one a tensor, in the plan's order, of the planned shapes.
        """
        if any(bucket.phase is Phase.RECEIVED for bucket in self._buckets.values()):
            self.rollback()
        if not self.is_under_way:
            self._fit()
            self._follow()
            self._turn_to(self.ratio)
        bucket = self._buckets[ordinal]
        self._drain(bucket)
        bucket.committed_last, bucket.measurable = False, True
        rung = self._schedule.label(self.plan.config.ratio)
        name = f"{self.name}{rung}.{ordinal}"
        bucket.probe.take(gradients)
        if self.momentum is None:
            bucket.route.send(gradients, name)
        else:
            bucket.route.send(self.momentum.correct(bucket.plan, gradients), name)
            self.momentum.mask(bucket.plan, bucket.route.clear)
        bucket.phase = Phase.SENT

    @property
    def ratio(self) -> float:
        """That of a step that begins now."""
        return self._schedule.ratio_at(self._committed) if self._asked is None else self._asked

    def set_ratio(self, ratio: float | None) -> None:
        """Take a rung from the next step on, or go back to the schedule (None).

        Call it on every rank, between the same two steps. Residuals stay as they are; a step at 1.0
        sends all of them.

        Raises:
            ConfigError: it is no rung; see `horovod_topk.core.schedule`.
        """
        if ratio is not None:
            self._schedule.check(ratio)
        self._asked = ratio

    @property
    def clock(self) -> tuple[int, float | None]:
        """What the ratio of the next step follows from: committed steps, and what a user asked."""
        return self._committed, self._asked

    @clock.setter
    def clock(self, clock: tuple[int, float | None]) -> None:
        self._committed, self._asked = clock

    @property
    def turns(self) -> int:
        """How often buckets have to advance before they can be finished."""
        return self._exchange.turns

    def advance(self) -> None:
        """Take every bucket under way to its next collective; `finish` does so for all `turns`.

        Raises:
            PayloadError, PlanMismatchError: a rank sent something else than a bucket.
        """
        failed: TopKError | None = None
        for bucket in self._buckets.values():
            try:
                bucket.route.advance()
            except TopKError as error:  # other ranks wait for all of the buckets
                failed = failed or error
        if failed is not None:
            raise failed

    def finish(
        self,
        ordinal: int,
        gradients: Sequence[Array],
        targets: Sequence[Array] | None = None,
        gain: float = 1.0,
    ) -> None:
        """Wait for a bucket and replace its gradients by the exchanged ones.

        Args:
            ordinal: the bucket.
            gradients: those that were launched.
            targets: where to write; the gradients themselves by default.
            gain: what to multiply them by; residuals stay in the units that were launched.

        Raises:
            NotLaunchedError: nothing is under way for this bucket.
            GradientChangedError: a gradient is not what was launched.
            PayloadError, PlanMismatchError: a rank sent something else than this bucket.
        """
        bucket = self._buckets[ordinal]
        if not bucket.route.is_under_way:
            raise NotLaunchedError(
                f"bucket {ordinal} was finished in phase {bucket.phase.value!r}",
                cure="Launch every bucket once before it is finished",
            )
        for _ in range(self.turns):
            self.advance()
        bucket.route.wait()
        self._check_unchanged(bucket, gradients)
        flags = bucket.route.receive(gradients if targets is None else targets, gain)
        bucket.flagged = bucket.plan.names(flags)
        bucket.phase = Phase.RECEIVED

    def commit(self) -> bool:
        """End the step: what was not sent becomes the residual, unless a tensor was flagged.

        Returns:
            Whether the residuals changed. A call without a finished bucket does nothing.
        """
        if self.is_under_way:
            return False
        received = list(self._received())
        if any(bucket.flagged for bucket in received):
            self.rollback()
            return False
        for bucket in received:
            bucket.route.swap()
            if self.momentum is not None:
                self.momentum.swap(bucket.plan)
            bucket.committed_last = True
        self._end_step(received, committed=True)
        return bool(received)

    def rollback(self) -> None:
        """End the step: residuals stay as they were before it, bit for bit."""
        self._end_step(list(self._received()), committed=False)

    def abandon(self) -> None:
        """Forget a step in any phase; collectives under way are waited for."""
        for bucket in self._buckets.values():
            self._drain(bucket)
        self.rollback()

    def replan(self, plan: Plan) -> None:
        """Take on a plan with fewer tensors; their residuals are kept, and others' have to be 0."""
        for bucket in self._buckets.values():
            if bucket.plan not in plan.buckets:
                self._drain(bucket)
        self.registry.replan(plan)
        for _, registry in self._others():
            registry.replan(plan)
        self.plan = plan
        kept = {i: b for i, b in self._buckets.items() if b.plan in plan.buckets}
        self._buckets = {
            b.ordinal: kept.get(b.ordinal) or self._make_bucket(b) for b in plan.buckets
        }

    def _fit(self) -> None:
        """Keep what is owed where ranks have come or gone: those that came owe nothing."""
        units, self.units = self.units, self.ranks
        if units is not None and units != self.ranks:
            self.registry.scale(rescaling(self.plan.reduction, units, self.ranks))

    def _follow(self) -> None:
        """Owe the same updates at learning rates that have changed."""
        factors = {} if self.rates is None else self.rates.turn()
        if factors:
            for registry in self._kept():
                registry.rescale(factors)
            self._forget_gradients()

    def _turn_to(self, ratio: float) -> None:
        """Take another rung, where there is nothing under way."""
        if ratio == self.plan.config.ratio:
            return
        plan = self.plan.under(self._schedule.settings(ratio))
        self.registry.turn_to(plan)
        for _, registry in self._others():
            registry.turn_to(plan)
        self.plan = plan
        self._buckets = {b.ordinal: self._make_bucket(b) for b in plan.buckets}

    @property
    def ranks(self) -> int:
        """How many ranks exchange."""
        return self._exchange.ranks

    @property
    def rank(self) -> int:
        """This one among them."""
        return self._exchange.rank

    def state_dict(self) -> dict[str, Any]:
        """Copies of this rank's residuals, and of those of the shards it owns.

        With warm-up also how many steps were committed, from which it goes on; with `follow_lr` the
        learning rates in whose units residuals are; the ratio that was asked for, if one was; and
        the tensors that have left the plan, for which nothing is owed.
        """
        state = self.registry.state_dict()
        if self.plan.config.warmup is not None:
            state[COMMITTED] = self._committed
        if self._asked is not None:
            state[ASKED] = self._asked
        if self.rates is not None:
            state[RATES] = dict(self.rates.units)
        if self.owned is not None:
            state["owned"] = dict(self._exchange.owner) | self.owned.state_dict()
        if self.momentum is not None:
            state["velocity"] = self.momentum.registry.state_dict()
        for name, registry in self.states.items():
            shared = is_shared(self.plan, name)
            state[METHOD_STATE + name] = {**registry.state_dict(), SHARED: shared}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take on residuals; a step under way is abandoned.

        Raises:
            StateDictError: a residual does not fit; nothing has changed.
        """
        check_origin(state, [tensor.spec for tensor in self.plan.tensors()], self.plan.reduction)
        check_owner(self._exchange.owner if self.owned is not None else None, state.get("owned"))
        committed, rates = committed_of(state, self._committed), rates_of(state)
        asked = self._schedule.rung(asked_of(state), self._asked)
        check_velocity(self.momentum is not None, state)
        self.registry.check(state)
        others = dict(self._others())
        for part, registry in others.items():
            registry.check(state[part])
        self.abandon()
        self._committed, self._asked = committed, asked
        self._owe_at(rates)
        self.registry.load_state_dict(state)
        for part, registry in others.items():
            registry.load_state_dict(state[part])
        self._forget_gradients()

    def reset(self) -> None:
        """Set every residual to zero; a step under way is abandoned."""
        self.abandon()
        self.registry.reset()
        self._owe_at({})
        for _, registry in self._others():
            registry.reset()
        self._forget_gradients()

    def on_step(self, callback: Callable[[StepCounters], None]) -> None:
        """Call `callback` at the end of every step, committed or rolled back."""
        self._callbacks.append(callback)

    def traffic(self) -> Traffic:
        """Bytes of this rank, each step."""
        return self._exchange.traffic(self.plan)

    def planned(self) -> Stats:
        """What is known of every step before it is taken."""
        return planned(self.plan, self._exchange)

    def residual_norm(self) -> float:
        """Euclidean norm of what this rank keeps of its own gradients. Waits for the device."""
        return self._norm_of(self.registry)

    def owned_norm(self) -> float:
        """Of what it keeps as an owner, in units of what owners add up; 0 if it is none. Waits."""
        return 0.0 if self.owned is None else self._norm_of(self.owned)

    def owed(self, name: str) -> float:
        """Norm of what this rank keeps of one tensor. Waits for the device."""
        return math.hypot(*(self._ops.norm(each.residual(name)) for each in self._kept()))

    def gradient_norm(self) -> float:
        """Euclidean norm of the gradients launched last. Waits for the device."""
        return math.hypot(*(self._bucket_norm(b) for b in self._buckets.values()))

    def _kept(self) -> list[ResidualRegistry[Array]]:
        """What is owed: by this rank, and by the owner it is."""
        return [self.registry] if self.owned is None else [self.registry, self.owned]

    def _owe_at(self, rates: dict[str, float]) -> None:
        if self.rates is not None:
            self.rates.units = rates

    def _others(self) -> Iterator[tuple[str, ResidualRegistry[Array]]]:
        """What is kept besides this rank's residuals, by its name in a state dict."""
        if self.owned is not None:
            yield "owned", self.owned
        if self.momentum is not None:
            yield "velocity", self.momentum.registry
        for name, registry in self.states.items():
            yield METHOD_STATE + name, registry

    def _norm_of(self, registry: ResidualRegistry[Array]) -> float:
        return math.hypot(*(self._ops.norm(each.residual) for each in registry.all_arenas()))

    def _forget_gradients(self) -> None:
        for bucket in self._buckets.values():
            bucket.measurable = False

    def _bucket_norm(self, bucket: Bucket[Array]) -> float:
        if not bucket.measurable:
            return 0.0
        return bucket.route.gradient_norm(committed=bucket.committed_last)

    def _make_bucket(self, plan: BucketPlan) -> Bucket[Array]:
        residuals = self.registry.shards(plan.ordinal)
        owned = () if self.owned is None else self.owned.shards(plan.ordinal)
        states = {name: each.arenas(plan.ordinal) for name, each in self.states.items()}
        more: Any = {"states": states} if states else {}
        route = self._exchange.route(plan, residuals, owned, self._ops, self._codec, **more)
        return Bucket(plan, route, Probe(self._ops))

    def _received(self) -> Iterator[Bucket[Array]]:
        return (b for b in self._buckets.values() if b.phase is Phase.RECEIVED)

    def _check_unchanged(self, bucket: Bucket[Array], gradients: Sequence[Array]) -> None:
        if bucket.probe.still(gradients):
            return
        names = ", ".join(t.spec.name for t in bucket.plan.tensors[:3])
        raise GradientChangedError(
            f"a gradient of bucket {bucket.plan.ordinal} ({names}, ...) is not the one that was "
            "sent",
            cure="Clip, unscale or edit gradients after optimizer.synchronize(), then step inside "
            "optimizer.skip_synchronize()",
        )

    def _drain(self, bucket: Bucket[Array]) -> None:
        """Let a collective that nobody will read come to its end."""
        bucket.route.drain()
        if bucket.phase is Phase.SENT:
            bucket.phase = Phase.IDLE

    def _end_step(self, received: Sequence[Bucket[Array]], *, committed: bool) -> None:
        if not received:
            return
        flagged = tuple(name for bucket in received for name in bucket.flagged)
        for bucket in received:
            bucket.phase, bucket.flagged = Phase.IDLE, ()
        self.steps += committed
        self._committed += committed
        self.rolled_back += not committed
        counters = count_step(self.steps + self.rolled_back, committed, self.traffic(), flagged)
        for callback in self._callbacks:
            callback(counters)
