"""`StepRunner` runs one optimizer's steps and keeps its state in arenas.

PyTorch's adapters and simulated ranks use it; TensorFlow keeps its state in variables. Residuals,
owner's residuals and velocities are in pairs of arenas, which a committed step swaps. It runs
`core.run.step.Step` over them, and commits a step on the host unless a tensor was flagged. A launch
after a finish begins a new step, and rolls back a step that was not committed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar, cast

from horovod_topk.core.codec.codec import PayloadCodec
from horovod_topk.core.codec.measures import EXPOSED, STEP, VERDICT, Rows
from horovod_topk.core.codec.momentum import check_dtypes
from horovod_topk.core.control.allocation import is_due
from horovod_topk.core.exchange.meeting import Meets
from horovod_topk.core.exchange.probe import Probe, Probed
from horovod_topk.core.exchange.protocol import Exchange, Storage, Traffic
from horovod_topk.core.exchange.reduce import Whole, declared, state_plan
from horovod_topk.core.exchange.selection import dense_beside
from horovod_topk.core.plan.buckets import BucketPlan, Plan
from horovod_topk.core.plan.facts import digest_of, digest_of_rates, mismatch, pack, with_ratio
from horovod_topk.core.plan.payload import FACTS_BYTES
from horovod_topk.core.run.follower import Followers
from horovod_topk.core.run.state import State
from horovod_topk.core.run.step import Step
from horovod_topk.core.run.timing import StepTimer
from horovod_topk.core.state.learning_rates import Rates
from horovod_topk.core.state.reshard import rescaling
from horovod_topk.core.state.residual import STORED, Arenas, ResidualRegistry, Squares
from horovod_topk.core.state.state_dict import METHOD_STATE, OWNED, RESIDUALS, VELOCITY
from horovod_topk.errors import TopKError
from horovod_topk.methods.protocol import Allocation
from horovod_topk.ops import Ops

Array = TypeVar("Array")

SAMPLED = 256  # one step in so many sums up squares, which takes passes over memory
WATCHED = 128  # the same, if the guard has the rule `residual`
NARROW = 16  # the same, if values that are sent may saturate


class StepRunner(State[Array]):
    """Error feedback of one optimizer, in arenas.

    Args:
        plan: the tensors, at the ratio of the settings.
        timer: measures the seconds of each step; None: a timer that measures no collective.
        followers: those of the buckets, if the update depends on exchanges.
    """

    plan: Plan
    exchange: Exchange[Array]
    step: Step[Array]  # step at the present ratio level; advances and finishes launched buckets
    rates: Rates | None

    def __init__(
        self,
        plan: Plan,
        ops: Ops[Array],
        codec: PayloadCodec[Array],
        exchange: Exchange[Array],
        name: str,
        timer: StepTimer | None = None,
        followers: Followers | None = None,
    ) -> None:
        super().__init__(plan.config, plan.reduction, ops, update_rule=plan.update_rule)
        self._followers = followers
        self.plan, self.exchange, self._codec, self.name = plan, exchange, codec, name
        self._usual = exchange  # while gradients are compressed
        self._dense: Exchange[Array] | None = None  # after the guard has ended compression
        self._agreed = plan
        self.timer, self._sums = timer or StepTimer(), cast("Array | None", None)
        # What is handed on does not refer to this runner: memory is free when it is deleted.
        counter = self.counter
        codec.draw_from(lambda: counter.committed, lambda: exchange.rank)
        stored = STORED[plan.config.residuals]
        self.registry = ResidualRegistry(plan, ops, exchange.holders, stored)
        self.owned = ResidualRegistry(plan, ops, exchange.owned, stored) if exchange.parts else None
        self.velocity: ResidualRegistry[Array] | None = None
        if plan.config.momentum:
            check_dtypes(plan)
            self.velocity = ResidualRegistry(plan, ops)
        self._declared = declared(plan)
        self.states = {name: self._state(name) for name in self._declared}
        parts = {RESIDUALS: self.registry, OWNED: self.owned, VELOCITY: self.velocity}
        parts |= {METHOD_STATE + name: part for name, part in self.states.items()}
        self._registries = {key: part for key, part in parts.items() if part is not None}
        self.parts = {**self._registries}
        self._numbers: dict[str, float] = {}  # this rank's measures of the previous step
        self._ended: float | None = None  # end of the previous step, by `time.perf_counter`
        guard = plan.config.guard
        self._sampled = WATCHED if guard is not None and guard.residual is not None else SAMPLED
        self._sampled = NARROW if self.saturates else self._sampled
        self._level = plan.config.ratio, True, exchange, self.allocation
        self._ranks = self.rank_and_ranks  # that the buckets' exchanges are built for
        self.step = self._new_step()
        self.frozen: Callable[[], Collection[str]] = tuple  # tensors whose learning rate is 0 now
        meets: object = exchange.collective
        self._meets = meets if isinstance(meets, Meets) else None
        self._probes = 0  # steps from one probe to the next; 0: there is no probe
        self._met = self._sends  # what this rank sends is known to all ranks
        self._refused: tuple[object, TopKError] | None = None  # by a meeting

    @property
    def agreed(self) -> Plan:
        """`State.agreed`: the plan at the ratio of the settings, before any tensor was dropped."""
        return self._agreed

    @property
    def ranks(self) -> int:
        """Number of ranks that exchange gradients."""
        return self.exchange.ranks

    @property
    def arrived(self) -> Mapping[int, Rows]:
        """Latest measures of all ranks, by bucket ordinal; see `core.codec.measures`."""
        return self._codec.measures.arrived

    def launch(self, ordinal: int, gradients: Sequence[Array]) -> None:
        """Compress a bucket and start its exchange; the first bucket begins a new step."""
        if self.step.received:
            self.rollback()
        if not self.step.sent:
            self._begin_step()
        self.step.begin(ordinal, gradients)

    @property
    def probed(self) -> Probed:
        """`State.probed`."""
        return Probed() if self.step.probe is None else self.step.probe.result

    def probe_every(self, every: int | None) -> None:
        """`State.probe_every`."""
        probe, collective = None, self._usual.collective
        if every is not None:
            probe = Probe(every, collective, self._ops, self.name)
        self.step.probe, self._probes = probe, every or 0

    def commit(self, without: Collection[str] = (), frozen: Collection[str] = ()) -> bool:
        """End the step: elements not sent become the residual, unless a tensor was flagged.

        Returns whether they did. A call without a finished bucket does nothing.

        without, frozen: names of tensors whose residuals stay; see `Step.commit`.
        """
        step = self.step
        if step.sent:
            return False
        if step.flagged:
            self.rollback()
            return False
        sums = step.sample() if step.samples and step.received else []
        if step.received:
            self._put_back(self.registry.pieces.keys() - {*without, *frozen})
        if not step.commit(without, frozen):
            return False
        self._take_sample()
        self._sums = self._ops.joined(sums) if sums else None
        self.counter.committed += 1
        if without:
            self._left_out = digest_of((name.encode() for name in sorted(without)), self._left_out)
        self._end((), committed=True)
        return True

    def rollback(self) -> None:
        """End the step and leave residuals bitwise as they were before it."""
        flagged, whole = self.step.flagged, len(self.step.received) == len(self.plan.buckets)
        if not self.step.sent:
            self._put_back()
        if self.step.roll_back():
            self._end(flagged, committed=False, whole=whole)

    def abandon(self) -> None:
        """Roll back a step in any phase, after waiting for collectives under way."""
        self.step.drain()
        self.rollback()

    def has_changed(self) -> None:
        """`State.has_changed`."""
        self.step.forget_gradients()

    def replan(self, plan: Plan) -> None:
        """Switch to a plan with fewer tensors; residuals of dropped tensors have to be 0."""
        self.step.drain_others(plan)
        for registry in self._registries.values():
            registry.replan(plan)
        self.plan = plan
        self.step.replan(plan)

    def decay_residuals(self, factor: float) -> None:
        """Multiply all residuals by a factor up to 1, equal on all ranks, after a commit."""
        if factor != 1.0:
            for registry in self._sent():
                registry.scale(factor)
            self.step.forget_gradients()

    def share_with(self, other: StepRunner[Array]) -> None:
        """Use another rank's arrays of states that the optimizer's update writes.

        Simulated ranks have one optimizer.
        """
        self.states |= {name: part for name, part in other.states.items() if part.in_place}
        self.step = self._new_step()

    def traffic(self) -> Traffic:
        """Bytes that this rank sends in each step."""
        return self.exchange.traffic(self.plan)

    def norm_of(self, name: str) -> float:
        """Euclidean norm of one tensor's residual and owner's residual. Waits for the device."""
        return math.hypot(*(self._ops.norm(each.residual(name)) for each in self._sent()))

    def squares(self) -> Squares:
        """`State.squares`."""
        return self.step.squares()

    def _end(self, flagged: Sequence[str], *, committed: bool, whole: bool = True) -> None:
        """Count a step that has ended, and let the schedule and the guard decide.

        whole: whether all buckets were received; else other ranks may have seen other flags, and
            the guard ignores them.
        """
        seconds, now = self.timer.seconds, time.perf_counter()
        self._numbers.clear()
        self._numbers |= {EXPOSED: seconds.exposed_seconds, STEP: now - (self._ended or now)}
        self._ended = now
        if committed:
            self.guard.time(seconds.cost, self.counter.committed)
            if self.step.weighs:
                self.allocate(self._agreed, self.step.weights())
        known = flagged if whole else ()
        fell_back = self.decide(self.plan, self.arrived, known, committed=committed)
        ended = self.traffic(), flagged
        self.end_step(*ended, committed=committed, seconds=seconds, fell_back=fell_back)

    def _take_sample(self) -> None:
        """Read the sums of squares of the last sampled step; by now the device has them ready."""
        if self._sums is None:
            return
        gradient, left, *rest = self._numbers_of(self._sums)
        whole = rest[0] if rest else 0.0
        self._sums = None
        decay = max(map(self.decay, self.registry.pieces), default=1.0)
        self.take_sample(Squares(gradient, whole, left), decay)

    def _sent(self) -> list[ResidualRegistry[Array]]:
        """This rank's residuals and, if there are any, the owner's residuals."""
        return [self.registry] if self.owned is None else [self.registry, self.owned]

    def _sent_arenas(self) -> Iterator[Arenas[Array]]:
        return (arenas for registry in self._sent() for arenas in registry.all_arenas())

    def _begin_step(self) -> None:
        """Rescale residuals whose units have changed, and switch to the step's ratio level.

        The number of ranks may have changed: exchanges whose arrays depend on it, or on this rank,
        are built anew. Ranks that have joined have zero residuals. A tensor whose learning rate is
        0 exchanges its gradient alone: what it sends moves no weight, and may enter a momentum.
        """
        self._put_back()  # if an error has ended the step before
        ranks = self.exchange.ranks
        before, self.ranks_before = self.ranks_before, ranks
        if before is not None and before != ranks:
            self.registry.scale(rescaling(self.residual_reduction, before, ranks))
        if self.rates is not None:
            self._rescale(self.rates.rescalings(self.counter.committed))
        facts = self._pack_facts()
        if self._meets is not None and self._sends != self._met:
            self._meet(self._meets, facts)
        if self.states_facts and self.plan.buckets:
            self._codec.measures.facts = {self.plan.buckets[0].ordinal: facts}
        level = self.ratio, self._adapts, self._next_exchange, self.allocation
        if level != self._level or self.rank_and_ranks != self._ranks:
            self._switch_level(*level)
        self.step.samples = self.steps % self._sampled == 0
        self.step.weighs = self.allocates and is_due(self.counter.committed + 1)
        self._numbers[VERDICT] = self.guard.tell()
        self.step.update_measures()
        if self._followers is not None:
            self._followers.begin_step()
        if self.step.probe is not None:
            self.step.probe.choose(self.plan, self.counter.committed)
        if frozen := self.frozen():
            for arenas in self._sent_arenas():
                arenas.set_aside(frozen, self._ops)
        self.timer.begin()

    def _put_back(self, counts: Collection[str] = ()) -> None:
        """Restore the residuals of frozen tensors, which a step has set aside.

        counts: names of the tensors whose part of the step is committed.
        """
        for arenas in self._sent_arenas():
            if arenas.aside:
                arenas.put_back(counts, self._ops)

    @property
    def _sends(self) -> tuple[object, ...]:
        """Settings of the next step that have to be equal on all ranks before any rank sends.

        Collectives would not match otherwise. Other differences are found in payloads.
        """
        sends = self._next_exchange is self._usual
        if self._meets is None or not self._meets.in_order:
            return sends, self._probes
        known = self.ratio, self.allocation, self.counter.lineage, self.counter.asked
        return sends, self._probes, *known

    def _meet(self, meets: Meets, facts: bytes) -> None:
        """Meet all ranks, as this one is about to send something else than before."""
        sends = self.counter.committed, self._sends
        if self._refused is not None and self._refused[0] == sends:
            raise self._refused[1]  # for another bucket of the same backward
        try:
            said = meets.meet(facts, f"{self.name}.meeting", patient=True)
            if len({*said}) > 1:
                numbers = [int.from_bytes(each, "little") for each in said]
                raise mismatch(dict(enumerate(numbers)))
        except TopKError as error:
            self._refused = sends, error
            raise
        self._met = sends[1]

    def _pack_facts(self) -> bytes:
        """Facts of the step that begins, as a payload's header states them."""
        counter, rates = self.counter, 0
        if self.rates is not None:
            rates = digest_of_rates(self.rates.shared())
        known = counter.lineage + self._left_out + self._probes + self._digest_of_allocation
        state = with_ratio(known, self.schedule.position(counter.asked))
        level = self.schedule.below_usual(self.ratio)
        number = pack(counter.committed, level, state, rates)
        return int(number).to_bytes(FACTS_BYTES, "little")

    def _rescale(self, factors: Mapping[str, float]) -> None:
        """Rescale residuals of the tensors whose learning rates have changed."""
        if factors:
            for registry in self._sent():
                registry.rescale(factors)
            for name, spec in self._declared.items():
                if spec.in_units:  # what has waited may arrive as large as it is now
                    self.states[name].rescale({n: max(1.0, f) for n, f in factors.items()})
            self.step.forget_gradients()

    @property
    def _adapts(self) -> bool:
        """Whether the next step's update depends on its exchange: not after a fall-back."""
        rule = self.update_rule
        return rule is None or rule.is_needed_dense or not self.guard.has_ended

    @property
    def _next_exchange(self) -> Exchange[Array]:
        """Exchange of the next step: the usual one, or a dense one if the guard asks for it."""
        if not (self.guard.has_ended or self.guard.tries_dense(self.counter.committed)):
            return self._usual
        if self._dense is None:
            self._dense = dense_beside(self._usual)
        return self._dense

    def _switch_level(
        self, ratio: float, adapts: bool, exchange: Exchange[Array], allocation: Allocation
    ) -> None:
        """Switch to another ratio level, while no bucket is under way.

        A method's state keeps the layout that it has at the ratio of the settings.
        """
        settings = self.schedule.settings(ratio, allocation)
        if exchange is not self._usual:
            settings = Whole.beside(settings)
        self._level, self.exchange = (ratio, adapts, exchange, allocation), exchange
        self._ranks = self.rank_and_ranks
        self.plan = self.plan.under(settings, self.update_rule if adapts else None)
        for registry in self._registries.values():
            if registry not in self.states.values():
                registry.switch_plan(self.plan)
        probe, self.step = self.step.probe, self._new_step()
        self.step.probe = probe

    def _new_step(self) -> Step[Array]:
        numbers, memory = self._numbers, (self.registry, self.owned, self.velocity, self.states)
        shared = self._ops, self._codec, self.exchange, self.name
        known = lambda name: numbers.get(name, 0.0), self.timer, self._followers
        return Step(self.plan, partial(_storage, *memory), *shared, *known)

    def decay(self, name: str) -> float:
        """A tensor's learning rate divided by its largest value so far; 1 if it is not known."""
        return 1.0 if self.rates is None else self.rates.decay(name)

    def _state(self, name: str) -> ResidualRegistry[Array]:
        """Allocate memory for one state variable of the method."""
        spec, laid_out = self._declared[name], self.plan

        def plans(bucket: BucketPlan) -> tuple[BucketPlan, ...]:
            return (state_plan(replace(bucket, update_rule=laid_out.update_rule), name),)

        state = ResidualRegistry(self.plan, self._ops, plans, in_place=spec.in_place)
        state.spec = spec
        return state


def _storage(
    residuals: ResidualRegistry[Array],
    owned: ResidualRegistry[Array] | None,
    velocity: ResidualRegistry[Array] | None,
    states: Mapping[str, ResidualRegistry[Array]],
    bucket: BucketPlan,
) -> Storage[Array]:
    """Memory of one bucket of a step."""
    i = bucket.ordinal
    return Storage(
        residuals.shards(i),
        () if owned is None else owned.shards(i),
        None if velocity is None else velocity.arenas(i),
        {name: registry.arenas(i) for name, registry in states.items()},
    )
