"""State of error feedback in tf.Variables that a graph reads and assigns."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import tensorflow as tf

from horovod_topk.core.codec.codec import PayloadCodec
from horovod_topk.core.codec.measures import HOST, VERDICT, Rows
from horovod_topk.core.codec.momentum import check_dtypes
from horovod_topk.core.exchange.membership import elastic
from horovod_topk.core.exchange.protocol import Collective, Storage
from horovod_topk.core.exchange.reduce import declared, state_plan
from horovod_topk.core.exchange.selection import exchange_of
from horovod_topk.core.plan.buckets import BucketPlan, Plan, TensorSpec
from horovod_topk.core.run.state import State
from horovod_topk.core.run.stats import describe
from horovod_topk.core.run.step import Step
from horovod_topk.core.state.learning_rates import fall_of
from horovod_topk.core.state.named_state import NamedState
from horovod_topk.core.state.residual import Arenas, Squares
from horovod_topk.core.state.state_dict import METHOD_STATE, OWNED, RESIDUALS, VELOCITY, converted
from horovod_topk.errors import ConfigError
from horovod_topk.methods.protocol import Method, Seeded, StateSpec, UpdateRule
from horovod_topk.ops.tensorflow import Array, Buffer, Scaled, TensorFlowOps, joined
from horovod_topk.tensorflow.collective import GraphTimer
from horovod_topk.tensorflow.learning_rates import StepRates, VariableRates
from horovod_topk.tensorflow.planning import unwrap
from horovod_topk.tensorflow.traced_schedule import TracedSchedule
from horovod_topk.tensorflow.variables import StateVariables, Stores, VariablePiece, own_variable
from horovod_topk.updates import formulas
from horovod_topk.updates.tensorflow import Codes, UpdateInputs
from horovod_topk.updates.tracker import (
    ARRIVALS,
    DAMPING,
    SQUARES,
    Moments,
    Rule,
    Tracker,
    selecting,
)

log = logging.getLogger("horovod_topk")


class VariableArenas(Arenas[Array]):
    """Arenas of one bucket in one graph: read from variables, and assigned when it commits.

    Args:
        plan: the bucket.
        pieces: where each tensor of the plan is.
        factors: a factor for each tensor's value, [n] of the same dtype; None: all are 1.
        moves: whether the step may change the variables, [] bool; None: it may.
        is_read_only: whether only the optimizer's update writes the variables.
    """

    def __init__(
        self,
        plan: BucketPlan,
        pieces: Sequence[VariablePiece],
        factors: Any = None,
        moves: Any = None,
        *,
        is_read_only: bool = False,
    ) -> None:
        stretches = [(tensor.start, tensor.stop) for tensor in plan.tensors]
        self._pieces, self._places = pieces, stretches
        whole = VariablePiece(pieces[0].variable, 0, plan.numel)
        if whole.is_all and stretches == [(p.start, p.stop) for p in pieces if p.shares(whole)]:
            self._pieces, self._places = [whole], [(0, plan.numel)]
        values = [piece.value() for piece in self._pieces]
        residual = joined(self._places, values, plan.numel)
        candidate = residual.copy()
        if factors is not None:
            residual, candidate = (Scaled(residual.value, stretches, factors) for _ in range(2))
        super().__init__(plan, residual, residual if is_read_only else candidate)
        self._moves, self._is_read_only = moves, is_read_only

    def swap(self) -> None:
        """Assign the candidates to the variables."""
        if self._is_read_only:
            return
        if self._moves is None:
            self._assign()
        else:
            tf.cond(self._moves, self._assign, lambda: None)
        super().swap()

    def _assign(self) -> None:
        assert isinstance(self.candidate, Buffer)  # `__init__` has made it
        left = self.candidate.split(at for stretch in self._places for at in stretch)
        for stretch, piece in zip(self._places, self._pieces, strict=True):
            piece.assign(left.read(*stretch))


class Tensors:
    """Mixin for a `State` whose arrays are buffers: its state dicts have tensors."""

    def wrapped(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """`State.wrapped`."""
        return converted(state, lambda array: Buffer(tf.convert_to_tensor(array)))

    def unwrapped(self, state: dict[str, Any]) -> dict[str, Any]:
        """`State.unwrapped`."""
        return converted(state, lambda array: array.value)


class VariableState(Tensors, State[Array]):
    """`State` of one list of variables, whose state variables are made with each plan."""

    rates: VariableRates | None

    def __init__(
        self,
        config: Method,
        reduction: str,
        variables: Mapping[str, Any],
        stores: Stores,
        collective: Collective[Array],
        update_rule: UpdateRule | None = None,
    ) -> None:
        if config.residuals != "float32":
            raise ConfigError(
                f"residuals={config.residuals!r} was given, and TensorFlow keeps residuals in "
                "float32",
                cure="Leave residuals= out, or train in PyTorch",
            )
        if config.guard is not None and config.guard.slower is not None:
            raise ConfigError(
                f"guard= has slower={config.guard.slower}, and TensorFlow's graphs take no trials",
                cure="Leave slower= out, or compare with dense: horovod-topk bench",
            )
        self.schedule_in_graphs = TracedSchedule(config)
        self.ops, self.collective, self._stores = TensorFlowOps(defers=True), collective, stores
        super().__init__(config, reduction, self.ops, self.schedule_in_graphs, update_rule)
        names = self._names = [*variables]
        self._id_of = {name: id(unwrap(each)) for name, each in variables.items()}
        self.load = 0  # number of the last load
        self.later = set(names)
        if config.follow_lr:
            rows = stores.rates.of([*variables.values()])
            self.rates = VariableRates(self._fall, dict(zip(variables, rows, strict=True)))
        self.last_squares = Squares()
        sends = set(HOST) & set(config.needed_measures)
        self._numbers = own_variable([0.0] * len(HOST)) if sends else None
        # SGD's cut, one for each of `names`, and what the update does to codes.
        self._cuts = own_variable([0.0] * len(names), dtype=tf.float64)
        self._codes = own_variable(Codes.FOLLOW, dtype=tf.int32)
        self._row = {name: row for row, name in enumerate(names)}
        self.arrived: dict[int, Rows] = {}  # measures of all ranks in the last step, by bucket
        self._specs: dict[str, TensorSpec] = {}

    def _fall(self, name: str) -> float:
        """`fall_of` a tensor."""
        return fall_of(self.config if self.plan is None else self.plan.config, name)

    def specs(self) -> dict[str, TensorSpec]:
        """`State.specs`."""
        return self._specs

    def _take_on(self, state: Mapping[str, Any], names: Collection[str]) -> None:
        own = {name: self._id_of[name] for name in names}
        super()._take_on(state, self._stores.residuals.take_on(own, self.load))

    @property
    def rank_and_ranks(self) -> tuple[int, int]:
        """`State.rank_and_ranks`."""
        return self.collective.rank, self.collective.size

    def squares(self) -> Squares:
        """`State.squares`: from the last step in which they were measured."""
        return self.last_squares

    def know(self, plan: Plan, variables: Mapping[str, Any]) -> None:
        """Make state variables for the tensors of a plan, and load their part of a state dict.

        variables: the model's variables, by tensor name.
        """
        if self.exchange is None:
            self._choose_exchange(plan)
        for name, spec in declared(plan).items():
            self.parts.setdefault(METHOD_STATE + name, NamedState(self.ops)).spec = spec
        if self.config.momentum:
            check_dtypes(plan)
        shared = {n for n, each in variables.items() if self._stores.residuals.has(each)}
        for bucket in plan.buckets:
            self._lay_out(bucket, variables)
        specs = {t.spec.name: t.spec for t in plan.tensors()}
        self._specs |= {name: specs[name] for name in variables}
        for part in self.parts.values():
            part.pieces = {n: part.pieces[n] for n in self._names if n in part.pieces}
        self.meet([name for name in variables if name in self.later], shared)

    def step(
        self,
        plan: Plan,
        name: str,
        rates: StepRates | None = None,
        moments: Mapping[str, Moments] = MappingProxyType({}),
        *,
        moves: Any = None,
    ) -> Step[Array]:
        """Make a step over the state variables, for one graph.

        Args:
            plan: the buckets, with the settings of the step.
            name: prefix of the collectives' names.
            rates: learning rates of the step, if residuals are rescaled by them.
            moments: what is known of Adam's second moments, by tensor name.
            moves: whether the learning rate is other than 0, [] bool; None: it is not known. At 0,
                residuals and states in their units stay; others change, as the optimizer's moments
                do.
        """
        exchange = self.exchange
        assert exchange is not None  # `know` has chosen it
        self._note_losses(plan, rates)
        states = declared(plan)

        def arenas_of(
            key: str, bucket: BucketPlan, at: int, rates: StepRates | None, least: float = 0.0
        ) -> Arenas[Array]:
            names = [tensor.spec.name for tensor in bucket.tensors]
            spec = states.get(key.removeprefix(METHOD_STATE), StateSpec(0))
            stays = moves is not None and (key in (RESIDUALS, OWNED) or spec.in_units)
            factors = None
            if rates is not None:
                factors = rates.factors(names, bucket.residual_dtype, least)
            elif stays and key in (RESIDUALS, OWNED):
                factors = tf.fill([len(names)], tf.cast(moves, bucket.residual_dtype))
            pieces = [self._piece(key, name, at) for name in names]
            own = factors, moves if stays else None
            return VariableArenas(bucket, pieces, *own, is_read_only=spec.in_place)

        def state_of(name: str, bucket: BucketPlan) -> Arenas[Array]:
            # What has waited may arrive as large as it is now.
            rescaled = (rates, 1.0) if states[name].in_units else (None,)
            return arenas_of(METHOD_STATE + name, state_plan(bucket, name), 0, *rescaled)

        def storage(bucket: BucketPlan) -> Storage[Array]:
            holders, owned = exchange.holders(bucket), exchange.owned(bucket)
            return Storage(
                [arenas_of(RESIDUALS, each, at, rates) for at, each in enumerate(holders)],
                [arenas_of(OWNED, each, 0, rates) for each in owned],
                arenas_of(VELOCITY, bucket, 0, None) if plan.config.momentum else None,
                {each: state_of(each, bucket) for each in states},
            )

        codec = PayloadCodec(self.ops, self.arrived)
        if self.states_facts:
            rate = None if rates is None else rates.rate
            known = plan.config.ratio, rate, self._digest_of_allocation
            stated = self.schedule_in_graphs.facts(*known)
            codec.measures.facts = {plan.buckets[0].ordinal: Buffer(stated)}
        committed = None
        if isinstance(self.config, Seeded):
            committed = self.schedule_in_graphs.read()
        codec.draw_from(lambda: committed, partial(_rank_in_graph, self.config, self.collective))
        followers = None
        if isinstance(plan.update_rule, Rule):
            followers = Tracker(plan.update_rule, self.ops, lambda: moments)
        shared = self.ops, codec, exchange, name
        return Step(plan, storage, *shared, number=self._number, followers=followers)

    @property
    def timer(self) -> GraphTimer:
        """The timer of a step's parts, used while its graph is built."""
        timer: GraphTimer = self.collective.timer  # type: ignore[attr-defined]
        return timer

    def take_numbers(self, numbers: Any) -> None:
        """Assign in a graph the measures that this rank sends in the next step: [3] float32."""
        if self._numbers is not None:
            self._numbers.assign(tf.ensure_shape(numbers, [len(HOST)]))

    def _number(self, name: str) -> Array:
        """A measure of this rank from the step before, in a graph."""
        assert self._numbers is not None
        at = HOST.index(name)
        return Buffer(self._numbers.read_value()[at : at + 1])

    def is_adapted(self, name: str) -> bool:
        """Whether a tensor's update depends on the exchange."""
        part = self.parts.get(METHOD_STATE + ARRIVALS)
        return part is not None and name in part.pieces

    def update_inputs(self, names: Sequence[str]) -> UpdateInputs:
        """What the update of some tensors needs of the last step's exchange."""
        codes = [self._piece(METHOD_STATE + ARRIVALS, name) for name in names]
        does = self._codes.read_value()
        if not self._normalises:
            places = [self._row[name] for name in names]
            return UpdateInputs(codes, None, tf.gather(self._cuts, places), does)
        pieces = [self._piece(METHOD_STATE + DAMPING, name) for name in names]
        every = list({id(each.variable): each.variable for each in pieces}.values())
        sizes = [0, *itertools.accumulate(variable.shape[0] for variable in every)]
        first = {id(variable): at for variable, at in zip(every, sizes[:-1], strict=True)}
        joint = tf.concat([tf.cast(variable, tf.float64) for variable in every], 0)
        places = [first[id(each.variable)] + each.start for each in pieces]
        both = [[place, place + 1] for place in places]
        kept = METHOD_STATE + SQUARES
        squares = [self._piece(kept, name) for name in names] if kept in self.parts else []
        return UpdateInputs(codes, tf.gather(joint, both), None, does, squares)

    @property
    def _normalises(self) -> bool:
        return isinstance(self.update_rule, Rule) and self.update_rule.normalises

    def note_codes(self, plan: Plan, sound: Any) -> None:
        """Note in a graph what the update does to codes; sound: whether the step is committed."""
        if plan.update_rule is not None:
            sends_all = plan.config.ratio == 1.0 and not plan.config.withheld()
            self._codes.assign(
                tf.where(sound, Codes.FILL if sends_all else Codes.FOLLOW, Codes.STAY)
            )

    def _note_losses(self, plan: Plan, rates: StepRates | None) -> None:
        """Assign, in a step of SGD, the share that elements lose if they always arrive."""
        if plan.update_rule is None or self._normalises:
            return
        names = [tensor.spec.name for tensor in plan.tensors()]
        found = {n for each in plan.buckets for n in selecting(plan.config, each.gradients)}
        loses = tf.constant([float(name in found) for name in names], tf.float64)
        decays = tf.ones_like(loses) if rates is None else rates.decays(names)
        places = [[self._row[name]] for name in names]
        self._cuts.scatter_nd_update(places, loses * formulas.cut_of(decays))

    def rates_at(self, plan: Plan, rate: Any) -> StepRates | None:
        """Return the learning rates of a step in a graph; None if residuals do not follow them.

        rate: the learning rate, [] float64, or None.
        """
        names = [tensor.spec.name for tensor in plan.tensors()]
        return None if rate is None or self.rates is None else self.rates.at(names, rate)

    def _watch_on(self, saved: Sequence[float], *, own: bool) -> None:
        """`State._watch_on`, for graphs too."""
        super()._watch_on(saved, own=own)
        self.schedule_in_graphs.enter(int(self.guard.memory.stage))
        if self._numbers is not None:  # the measures of the next step
            known = {VERDICT: self.guard.memory.sent}
            self._numbers.assign([known.get(name, 0.0) for name in HOST])

    def _choose_exchange(self, plan: Plan) -> None:
        """Choose the exchange together with all ranks."""
        self.exchange = exchange_of(plan, self.ops, self.collective)
        log.info("TopKEF: %s", describe(self.exchange))
        self.parts = {RESIDUALS: NamedState(self.ops)}
        if self.exchange.parts:
            self.parts[OWNED] = NamedState(self.ops)
        if self.config.momentum:
            self.parts[VELOCITY] = NamedState(self.ops)

    def _lay_out(self, bucket: BucketPlan, variables: Mapping[str, Any]) -> None:
        """Find or make the state variables of a bucket's tensors."""
        exchange, stores = self.exchange, self._stores
        assert exchange is not None
        sharded = tuple(map(str, exchange.owner.values())) if exchange.parts else None
        orders = {
            t.spec.name: None if sharded is None else (t.spec.name, sharded, self.reduction)
            for t in bucket.tensors
        }
        each = [variables[t.spec.name] for t in bucket.tensors]

        def make(
            part: NamedState[Array], store: StateVariables, holders: Sequence[BucketPlan]
        ) -> None:
            """holders: plans that together hold the part."""
            shards = list(orders.values()) if part in split else ()
            made = store.of(each, holders, shards) if holders else [()] * len(each)
            for i, (tensor, pieces) in enumerate(zip(bucket.tensors, made, strict=True)):
                spec = holders[0].tensors[i].spec if holders else tensor.spec
                part.specs[spec.name], part.pieces[spec.name] = spec, pieces

        split = [self.parts[key] for key in (RESIDUALS, OWNED) if key in self.parts]
        make(self.parts[RESIDUALS], stores.residuals, exchange.holders(bucket))
        if OWNED in self.parts:
            make(self.parts[OWNED], stores.owned, exchange.owned(bucket))
        if VELOCITY in self.parts:
            make(self.parts[VELOCITY], stores.velocities, (bucket,))
        for key, part in self.parts.items():
            if key.startswith(METHOD_STATE):
                name = key.removeprefix(METHOD_STATE)
                make(part, stores.methods[name], (state_plan(bucket, name),))

    def _piece(self, key: str, name: str, at: int = 0) -> VariablePiece:
        piece = self.parts[key].pieces[name][at]
        assert isinstance(piece, VariablePiece)
        return piece


def _rank_in_graph(config: Method, collective: Collective[Array]) -> int:
    """This rank, for the random numbers of a graph."""
    if elastic():
        raise ConfigError(
            f"{type(config).__name__} draws random numbers by the rank that a graph was built on, "
            "and this job is elastic",
            cure="Use a method whose random numbers are equal on all ranks, such as TopKEF (none) "
            "or RandomK, or run without --min-np and --max-np",
        )
    return collective.rank
