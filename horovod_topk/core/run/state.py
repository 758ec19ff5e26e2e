"""Error-feedback state of one optimizer, by tensor name: it is saved, loaded and reset here.

A `State` has named states: this rank's residuals, the owner's residuals, the velocities of momentum
correction, and those of the method and of the optimizer's update. It also has the number of
committed steps and the ratio that a user asked for, which give the ratio level of each step, and
the learning rates in whose units residuals are. Adapters store the arrays: PyTorch in arenas,
TensorFlow in variables. Some adapters learn of their tensors only when gradients come. Until then
the state keeps what was loaded for these tensors.
"""

from __future__ import annotations

import json
import logging
import math
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from horovod_topk.core.codec.measures import VERDICT, Rows, all_measures
from horovod_topk.core.control.allocation import Allocator
from horovod_topk.core.control.guard import COMMON, Watch, guard_of
from horovod_topk.core.control.schedule import Clock, Counter, HostCounter, Schedule
from horovod_topk.core.exchange.membership import elastic
from horovod_topk.core.plan import facts
from horovod_topk.core.plan.buckets import Plan, TensorSpec
from horovod_topk.core.run.counting import Counting
from horovod_topk.core.run.stats import NormSample, Stats, measured, planned, stored_bytes
from horovod_topk.core.state.learning_rates import LARGEST, RATES, RateUnits, rates_of
from horovod_topk.core.state.named_state import NamedState
from horovod_topk.core.state.residual import Squares
from horovod_topk.core.state.state_dict import (
    ALLOCATION,
    ASKED,
    COMMITTED,
    DECISION,
    GUARD,
    METHOD_STATE,
    OWNED,
    RELEASED,
    RESIDUALS,
    SHARED,
    VELOCITY,
    allocation_of,
    asked_of,
    check_can_apply,
    check_origin,
    check_owner,
    check_range,
    check_velocity,
    committed_of,
    decision_of,
    has_residuals,
    joined,
    pack_state,
    parts_of,
    steps_of,
    without,
)
from horovod_topk.errors import ConfigError, StateDictError
from horovod_topk.methods.protocol import ADAPTIVE, Allocation, Method, UpdateRule
from horovod_topk.ops import Ops

log = logging.getLogger("horovod_topk")

Array = TypeVar("Array")
FLOAT16 = 65504.0  # its largest number
_NOTHING: Mapping[str, Any] = {RESIDUALS: {}}  # a part of a state dict without arrays
_OF_TENSORS = ("shapes", RESIDUALS, RELEASED)  # entries of a state dict, by tensor name
_KEPT_BY_A_RANK = {RESIDUALS, OWNED, VELOCITY}  # parts that may differ from rank to rank


class State(Counting[Array]):
    """Error-feedback state of one optimizer, which lasts from step to step.

    Args:
        counter: stores the number of committed steps, the ratio asked for and the decision.
        update_rule: what is kept and sent for the optimizer's update, if anything.

    Attributes:
        parts: "residuals", "owned" if this exchange has owners, "velocity" with momentum.
        later: names of tensors that may still become known.
        rates: learning rates for rescaling residuals; None: residuals are not rescaled.
        ranks_before: number of ranks in the last step; None: there was no step.
        residual_reduction: "average" or "sum", which says how residuals are rescaled when ranks
            join or leave.
        allocation: which share of its elements each tensor sends; empty: all have the same ratio.
    """

    def __init__(
        self,
        config: Method,
        reduction: str,
        ops: Ops[Array],
        counter: Counter | None = None,
        update_rule: UpdateRule | None = None,
    ) -> None:
        super().__init__()
        self.config, self.reduction, self._ops = config, reduction, ops
        self.residual_reduction = reduction
        self.update_rule = update_rule
        self.schedule, self.guard = Schedule(config), Watch(config.guard)
        self.counter: Counter = HostCounter() if counter is None else counter
        self.allocation: Allocation = ()
        self._digested: tuple[Allocation, int] = self.allocation, 0  # with its digest
        self.later: set[str] = set()
        self.rates: RateUnits | None = None
        self.ranks_before: int | None = None
        # Whether ranks compare facts: one that joins an elastic job alone has others.
        self.states_facts = not elastic()
        self._left_out = facts.START  # digest of the tensors that commits have left out
        self._saturated: tuple[str, ...] = ()  # the warning of `take_sample`, once it is given
        self._waiting: dict[str, Any] = {}  # state dict of tensors that are not known yet
        self._shared: Mapping[str, Any] = {}  # the same, of `take_shared`

    def specs(self) -> dict[str, TensorSpec]:
        """Specs of the known tensors, as whole tensors, by name."""
        return {} if self.plan is None else {t.spec.name: t.spec for t in self.plan.tensors()}

    def wrapped(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Convert a state dict's arrays from the user's type to that of `ops`."""
        return state

    def unwrapped(self, state: dict[str, Any]) -> dict[str, Any]:
        """Convert a state dict's arrays from the type of `ops` to the user's."""
        return state

    @property
    def agreed(self) -> Plan | None:
        """The plan that has to be equal on all ranks; None: no tensor is known yet."""
        return self.plan

    @property
    def rank_and_ranks(self) -> tuple[int, int]:
        """This rank, and the number of ranks that exchange gradients."""
        assert self.exchange is not None
        return self.exchange.rank, self.exchange.ranks

    def abandon(self) -> None:
        """Roll back a step under way, before residuals are replaced."""

    def has_changed(self) -> None:
        """Called after residuals were replaced."""

    @property
    def ratio(self) -> float:
        """Ratio of the next step."""
        counter, guard = self.counter, self.guard
        known = counter.committed, counter.decision, counter.asked
        is_trial = guard.tries_dense(counter.committed)
        return self.schedule.ratio_at(*known, has_ended=guard.has_ended, is_trial=is_trial)

    def decide(
        self,
        plan: Plan,
        by_bucket: Mapping[int, Rows],
        flagged: Sequence[str] = (),
        *,
        committed: bool = True,
    ) -> str:
        """Let the schedule and the guard decide at the end of a step, before it is counted.

        Returns the guard's rule that ends compression with this step; empty: none does.

        by_bucket: measures of all ranks, for each bucket ordinal.
        flagged: names of tensors with a NaN or an infinity on some rank.
        """
        measures = all_measures(plan, by_bucket) if committed and plan.config.measures else None
        if committed and plan.config.schedule is not None:  # else the step had none of its levels
            before = self.counter.decision
            self.counter.decision = self.schedule.decide(before, plan.config.ratio, measures)
        ending = {
            "committed": committed,
            "flagged": bool(flagged),
            "logs": self.rank_and_ranks[0] == 0,
        }
        numbers = () if measures is None else measures.get(VERDICT, ())
        return self.guard.end(self.ended + 1, numbers=numbers, **ending)

    @property
    def allocates(self) -> bool:
        """Whether bytes are allocated to tensors in training."""
        return self.config.allocation == ADAPTIVE

    def allocate(self, plan: Plan, squares: Mapping[str, Array]) -> None:
        """Allocate bytes to tensors by the exchanged gradients of a committed step.

        squares: sum of squares of each tensor's exchanged gradient, [1] float32.
        """
        if squares:
            rule = self.update_rule
            allocator = Allocator(plan, is_linear=rule is not None and rule.is_linear)
            numbers = self._numbers_of(self._ops.joined([*squares.values()]))
            found = allocator.allocate(dict(zip(squares, numbers, strict=True)))
            self.allocation = self.allocation if found is None else found

    @property
    def _digest_of_allocation(self) -> int:
        """Digest of the allocation, which every step states; 0: there is none."""
        of, digest = self._digested
        if of is not self.allocation:  # it may name a thousand tensors
            digest = facts.digest_of([repr(self.allocation).encode()]) if self.allocation else 0
            self._digested = self.allocation, digest
        return digest

    def _take_allocation(self, saved: Mapping[str, int]) -> None:
        if self.allocates:
            self.allocation = tuple(sorted(saved.items()))

    @property
    def saturates(self) -> bool:
        """Whether values that are sent may be cut off: float16 holds 65,504 at most."""
        return getattr(self.config, "values", None) == "float16"

    def take_sample(self, squares: Squares, decay: float) -> None:
        """Note the sums of squares of a committed step; the guard judges them.

        Warns once if elements of the residual may be too large for float16: their norm is.

        decay: largest ratio over tensors of the learning rate to its largest value so far.
        """
        self.sample = NormSample.of(squares)
        self.guard.sample((self.sample.residual_norm_ratio or 0.0) * decay)
        norm = math.sqrt(max(squares.left, 0.0))
        if self.saturates and not self._saturated and norm > FLOAT16:
            text = (
                f"values='float16' sends at most {FLOAT16:,.0f} of an element in a step, and the "
                f"residual's norm is {norm:.3g}: large gradients may be sent in part for ever. "
                "Pass values='bfloat16', which has as many bits, or scale the loss down"
            )
            log.warning("TopKEF: %s", text)
            self._saturated = (text,)

    def stats(self) -> Stats:
        """Totals and norms so far, and what the guard did. Waits for the device."""
        of_guard: dict[str, Any] = {
            "warnings": (*self._saturated, *self.guard.warnings),
            "fallbacks": self.guard.fallbacks,
            "step_factor": self._step_factor(),
        }
        if self.plan is None or self.exchange is None:
            return Stats(active=True, **of_guard)
        known = planned(self.plan, self.exchange)
        sizes = {key.removeprefix(METHOD_STATE): stored_bytes(p) for key, p in self.parts.items()}
        return replace(
            known,
            element_bytes={key: size / max(known.elements, 1) for key, size in sizes.items()},
            steps=self.steps,
            rolled_back=self.rolled_back,
            total_sent_bytes=self.sent_bytes,
            total_dense_bytes=self.dense_bytes,
            residual_norm=self.norm(RESIDUALS),
            owned_norm=self.norm(OWNED),
            residual_norm_ratio=self.sample.residual_norm_ratio,
            level=self.plan.config.ratio,
            memory_bytes=self.memory_bytes,
            **of_guard,
            **vars(self.seconds),
            **vars(self.probed),
            **measured(self.squares()),
        )

    def _step_factor(self) -> float:
        """The smallest factor of the last step; 1 if there is none. Waits for the device."""
        known = (part for part in self.parts.values() if part.spec and part.spec.is_damping)
        arrays = [part.residual(name) for part in known for name in part.pieces]
        numbers = [x for each in arrays for x in self._numbers_of(each) if x > 0.0]
        return 1.0 if self.guard.has_ended else min(numbers, default=1.0)

    def _numbers_of(self, array: Array) -> tuple[float, ...]:
        """An array's numbers, as float32, on the host. Waits for the device."""
        data = self._ops.to_host(self._ops.pack_values(array, "float32"))
        return struct.unpack(f"<{len(data) // 4}f", data)

    def set_ratio(self, ratio: float | None) -> None:
        """Use a ratio level from the next step on, or go back to the schedule (None).

        Call it on every rank, between the same two steps. Residuals stay as they are; a step at 1.0
        sends all of them.
        """
        if ratio is not None:
            self.schedule.check(ratio)
            ratio = float(ratio)  # it may be NumPy's, or the whole number 1
        self.counter.asked = ratio

    def probe_every(self, every: int | None) -> None:
        """Compare a bucket with dense in one step of `every`; None: in none."""
        if every is not None:
            raise ConfigError(
                f"probe(every={every}) was called, and TensorFlow has no probe",
                cure="Leave it out, or probe in PyTorch",
            )

    @property
    def clock(self) -> Clock:
        """Committed steps, requested ratio, decision and guard: they give the next step's ratio."""
        counter = self.counter
        return Clock(counter.committed, counter.asked, counter.decision, self._remembered)

    @property
    def _remembered(self) -> Sequence[float]:
        """The guard's memory; empty if there is no guard."""
        return () if self.config.guard is None else tuple(map(float, self.guard.memory))

    def resume(self, clock: Clock, ranks: int | None = None) -> None:
        """Load a clock; `ranks` is the number of ranks the residuals are of, if it is known."""
        clock = Clock(*clock)
        self.counter.committed = clock.committed
        self.counter.lineage = self._left_out = facts.START
        self._ask(clock.asked)
        self._take_decision(clock.decision)
        self._watch_on(clock.guard, own=False)
        self.ranks_before = ranks or None

    def _watch_on(self, saved: Sequence[float], *, own: bool) -> None:
        """Load the guard's memory, if there is a guard; see `Watch.resume`."""
        if self.config.guard is not None:
            self.guard.resume(saved, own=own)

    def _ask(self, ratio: float | None) -> None:
        if ratio != self.counter.asked:
            self.counter.asked = ratio

    def _take_decision(self, saved: Sequence[float]) -> None:
        decision = self.schedule.usable(saved)
        if decision != self.counter.decision:
            self.counter.decision = decision

    def state_dict(self) -> dict[str, Any]:
        """Copies of this rank's residuals, owner's residuals and velocities, with counters.

        It also has the learning rates in whose units residuals are (with `follow_lr`), the ratio
        that a user asked for, if any, and the tensors that were dropped from the plan, whose
        residuals are zero.
        """
        state = self._packed(RESIDUALS)
        for key in self.parts:
            if key != RESIDUALS:
                state[key] = self._packed(key)
        waiting = self._waiting
        if self.exchange is not None:  # else return all that was loaded
            waiting = {k: v for k, v in waiting.items() if k in (*_OF_TENSORS, *parts_of(waiting))}
            if OWNED in state:
                state[OWNED] = dict(self.exchange.owner) | state[OWNED]
        state = joined(self.unwrapped(state), waiting)
        state[COMMITTED] = self.counter.committed
        state.pop(ASKED, None)
        if self.counter.asked is not None:
            state[ASKED] = self.counter.asked
        state.pop(DECISION, None)
        if self.counter.decision:
            state[DECISION] = list(self.counter.decision)
        state.pop(GUARD, None)
        if self._remembered:
            state[GUARD] = list(self._remembered)
        state.pop(ALLOCATION, None)
        if self.allocation:
            state[ALLOCATION] = dict(self.allocation)
        if self.rates is not None:
            for key, rates in self.rates.saved().items():
                state[key] = {**rates_of(self._waiting, key), **rates}
        return state

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Refuse a state dict that does not fit the tensors known so far."""
        check_velocity(bool(self.config.momentum), state)
        committed_of(state, 0)
        check_entries(state)
        if self.exchange is not None:
            self._check(self.wrapped(without(state, self.later)), self.specs())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state dict; a step under way is abandoned."""
        self.check_state_dict(state)
        self.abandon()
        self.counter.lineage = facts.digest_of(self._in_common(state))
        self._left_out = facts.START
        self._ask(self.schedule.level(asked_of(state), self.counter.asked))
        self._take_decision(decision_of(state))
        is_same = state.get("ratio") == self.config.ratio  # for which bytes were allocated
        self._take_allocation(allocation_of(state) if is_same else {})
        self._watch_on(guard_of(state), own=True)
        self.counter.committed = committed_of(state, self.counter.committed)
        self._begun += steps_of(state, self.ended) - self.ended
        if self.exchange is None:
            self._waiting = dict(state)
            return
        names = self.specs().keys()
        self._take_on(self.wrapped(without(state, self.later)), names)
        self._keep_waiting(without(state, names))
        self.has_changed()

    def _in_common(self, state: Mapping[str, Any]) -> Iterator[bytes]:
        """Bytes of all that a state dict has that has to be equal on all ranks."""
        memory = guard_of(state)[: len(COMMON)]
        rates = [rates_of(state, key) for key in (RATES, LARGEST)]
        allocated = [allocation_of(state)] if ALLOCATION in state else []
        known = asked_of(state), [*decision_of(state)], [*memory], rates, *allocated
        yield json.dumps(known, sort_keys=True).encode()
        arrays = self.wrapped(state)
        for key in sorted(key for key in parts_of(state) if state[key].get(SHARED)):
            for name, array in sorted(arrays[key][RESIDUALS].items()):
                yield f"{key} {name}".encode()
                is_coded = self._ops.dtype(array) == "uint8"
                wide = self._ops.cast(array, "float32") if is_coded else array
                yield self._ops.to_host(self._ops.pack_values(wide, "float32"))

    def shared_state(self) -> dict[str, Any]:
        """A state dict with the state that is equal on all ranks, and nothing else.

        That is the method's, the allocation, and learning rates.
        """
        shared = {key: self._packed(key) for key, p in self.parts.items() if p.facts.get(SHARED)}
        rates = {} if self.rates is None else self.rates.saved()
        allocated = {ALLOCATION: dict(self.allocation)} if self.allocation else {}
        return self.unwrapped(pack_state(self.config.ratio, [], {}) | shared) | rates | allocated

    def take_shared(self, state: Mapping[str, Any]) -> None:
        """Load the `shared_state` of another rank; a step under way is abandoned.

        Tensors that are not known yet get theirs when they become known.
        """
        self.abandon()
        shared = self.wrapped(state)
        self._take_on_shared(shared, self.specs().keys() - self.later, self.later)
        self._take_allocation(allocation_of(state))
        self._shared = shared

    def _take_on_shared(
        self, shared: Mapping[str, Any], names: Collection[str], others: Collection[str]
    ) -> None:
        """Copy shared state to the tensors `names`; it may also have that of `others`."""
        mine = without(shared, others)
        rates = {key: rates_of(shared, key) for key in (RATES, LARGEST)}
        pairs = [(self.parts[key], mine[key]) for key in parts_of(mine) if key in self.parts]
        for part, within in pairs:
            part.check(within, names)
        for part, within in pairs:
            part.take_on(within, [name for name in part.pieces if name in names])
        if self.rates is not None:
            # Residuals that are in other units are zero: of ranks that joined, or went back.
            for key, own in (saved := self.rates.saved()).items():
                saved[key] = own | {name: r for name, r in rates[key].items() if name in names}
            self.rates.load(saved)

    def meet(self, names: Collection[str], shared: Collection[str] = ()) -> None:
        """Copy loaded state to tensors that have just become known.

        shared: those whose `shared_state` another list of variables has taken on, and moved.
        """
        others, new = {*self.later, *self.specs()} - set(names), set(names) - set(shared)
        if self._waiting:
            mine = self.wrapped(without(self._waiting, others))
            self._check(mine, names)
            self._take_on(mine, names)
            self._keep_waiting(without(self._waiting, names))
        self._take_on_shared(self._shared, new, others | (set(names) - new))
        self.later -= set(names)

    def reset(self) -> None:
        """Set every residual and velocity to zero; a step under way is abandoned.

        What all ranks know alike stays: how often elements arrive, what the method has learnt, and
        the largest learning rates so far.
        """
        self.abandon()
        done = f"reset after {self.counter.committed}".encode()
        self.counter.lineage = facts.digest_of([done], self.counter.lineage)
        self._waiting, self._shared = {}, {}
        for key in self.parts.keys() & _KEPT_BY_A_RANK:
            self.parts[key].reset()
        if self.rates is not None:
            self.rates.load({LARGEST: self.rates.saved()[LARGEST]})
        self.has_changed()

    def forget(self) -> None:
        """Set all that the state has to zero; a step under way is abandoned."""
        self.abandon()
        for part in self.parts.values():
            part.reset()
        if self.rates is not None:
            self.rates.load({})
        self.allocation = ()
        self.reset()

    def residual(self, name: str) -> Array:
        """A copy of one tensor's residual, flat."""
        return self._ops.clone(self.parts[RESIDUALS].residual(name))

    def _packed(self, key: str) -> dict[str, Any]:
        ratio = self.config.ratio
        return self.parts[key].state_dict(ratio) if key in self.parts else pack_state(ratio, [], {})

    def _check(self, state: Mapping[str, Any], names: Collection[str]) -> None:
        """Refuse a state dict that does not fit the known tensors `names`."""
        check_origin(state, [s for n, s in self.specs().items() if n in names], self.reduction)
        assert self.exchange is not None
        check_owner(self.exchange.owner if self.exchange.parts else None, state.get(OWNED))
        if not self.config.error_feedback:
            check_can_apply(state, type(self.config).__name__, self._ops)
        for key, part in self.parts.items():
            if part.spec is not None and part.spec.optional:  # what does not fit starts at zero
                specs = [part.specs[each] for each in part.pieces if each in names]
                name = key.removeprefix(METHOD_STATE)
                check_range(name, part.spec.range, _within(state, key), specs, self._ops)
            elif key.startswith(METHOD_STATE):
                _check_method_state(state, key, part, names)
            else:
                part.check(_within(state, key), names)

    def _take_on(self, state: Mapping[str, Any], names: Collection[str]) -> None:
        """Copy a checked state dict into the state of the tensors `names`."""
        for key, part in self.parts.items():
            within, mine = _within(state, key), [name for name in part.pieces if name in names]
            if part.is_optional:  # those that do not fit start at zero
                within = self._adopted(key, within)
                for name in mine:
                    alone = without(within, within["residuals"].keys() - {name})
                    part.take_on(alone if _fits(part, alone, [name]) else _NOTHING, [name])
            else:
                part.take_on(within, mine)
        if self.rates is not None:
            saved = {}
            for key, rates in self.rates.saved().items():
                loaded = {n: rate for n, rate in rates_of(state, key).items() if n in names}
                saved[key] = {n: rate for n, rate in rates.items() if n not in names} | loaded
            self.rates.load(saved)

    def _adopted(self, key: str, within: Mapping[str, Any]) -> Mapping[str, Any]:
        """The part of a state dict with its arrays as they are kept now."""
        if self.update_rule is None:
            return within
        name, adopted = key.removeprefix(METHOD_STATE), self.update_rule.adopted
        arrays = {n: adopted(name, a, self._ops) for n, a in within[RESIDUALS].items()}
        return {**within, RESIDUALS: arrays}

    def _keep_waiting(self, rest: dict[str, Any]) -> None:
        self._waiting = rest if self.later and has_residuals(rest) else {}


def check_entries(state: Mapping[str, Any]) -> None:
    """Refuse a state dict with an entry beside its arrays that no state dict has."""
    for reads in (asked_of, decision_of, allocation_of, guard_of):
        reads(state)
    for key in (RATES, LARGEST):
        rates_of(state, key)


def _check_method_state(
    state: Mapping[str, Any], key: str, part: NamedState[Any], names: Collection[str]
) -> None:
    """Refuse a state dict that lacks the method's own state, or has it for other settings."""
    name = key.removeprefix(METHOD_STATE)
    if key not in state:
        raise StateDictError(
            f"the state dict has nothing for the method's {name}: another compressor saved it",
            cure="Load it with that compressor, or from a checkpoint with strict=False, which "
            f"starts {name} at zero",
        )
    try:
        part.check(state[key], names)
    except StateDictError as error:
        raise StateDictError(
            f"the method's {name}: {error.problem}",
            tensor=error.tensor,
            cure="Load it with the settings that it was saved with, or from a checkpoint with "
            f"strict=False, which starts {name} at zero",
        ) from None


def _within(state: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """One part of a state dict; without arrays, if the state dict has no such part."""
    return state if key == RESIDUALS else state.get(key, _NOTHING)


def _fits(part: NamedState[Any], within: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether a part of a state dict has an array of the right shape for each tensor."""
    try:
        part.check(within, names)
    except StateDictError:
        return False
    return True
