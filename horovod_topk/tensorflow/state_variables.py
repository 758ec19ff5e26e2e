"""State of error feedback in tf.Variables that a graph reads and assigns."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import tensorflow as tf

from horovod_topk.core.codec.measures import HOST, VERDICT, Rows
from horovod_topk.core.codec.momentum import check_dtypes
from horovod_topk.core.codec.payload_codec import PayloadCodec
from horovod_topk.core.exchange import Collective, Storage
from horovod_topk.core.exchange.membership import elastic
from horovod_topk.core.exchange.reduce import declared, state_plan
from horovod_topk.core.exchange.selection import exchange_of
from horovod_topk.core.plan.buckets import BucketPlan, Plan, TensorSpec
from horovod_topk.core.run.state import State
from horovod_topk.core.run.stats import describe
from horovod_topk.core.run.step import Step
from horovod_topk.core.state.learning_rates import fall_of
from horovod_topk.core.state.named_state import Part
from horovod_topk.core.state.residual import Arenas, Squares
from horovod_topk.core.state.state_dict import METHOD_STATE, OWNED, RESIDUALS, VELOCITY, converted
from horovod_topk.errors import ConfigError
from horovod_topk.methods.protocol import Follows, Method, Seeded, StateSpec
from horovod_topk.ops.tensorflow import Array, Buffer, TensorFlowOps
from horovod_topk.tensorflow.learning_rates import StepRates, VariableRates
from horovod_topk.tensorflow.timing import GraphTimer
from horovod_topk.tensorflow.traced_schedule import TracedSchedule
from horovod_topk.tensorflow.variables import RowPiece, Stores, VariablePiece, apart
from horovod_topk.updates import formulas
from horovod_topk.updates.tensorflow import Codes, Followed
from horovod_topk.updates.tracker import ARRIVALS, FACTORS, Moments, Rule, Tracker, selecting

log = logging.getLogger("horovod_topk")


class VariableArenas(Arenas[Array]):
    """Arenas of one bucket in one graph: read from variables, and assigned when it commits.

    Args:
        plan: the bucket.
        variables: one state variable for each tensor of the plan.
        factors: a factor for each variable's value, [n] of the same dtype; None: all are 1.
        moves: whether the step may change the variables, [] bool; None: it may.
    """

    def __init__(
        self,
        plan: BucketPlan,
        variables: Sequence[Any],
        factors: Any = None,
        moves: Any = None,
    ) -> None:
        parts, stop = [], 0
        values = [variable.value() for variable in variables]
        if factors is not None:
            values = TensorFlowOps().scaled(values, factors)
        for tensor, value in zip(plan.tensors, values, strict=True):
            if tensor.start > stop:  # a gap, for alignment
                parts.append(tf.zeros([tensor.start - stop], value.dtype))
            parts.append(value)
            stop = tensor.stop
        residual = Buffer.joined(parts)
        super().__init__(plan, residual, residual.copy())
        self._variables, self._moves = variables, moves

    def swap(self) -> None:
        """Assign the candidates to the variables."""
        if self._moves is None:
            self._assign()
        else:
            tf.cond(self._moves, self._assign, lambda: None)
        super().swap()

    def _assign(self) -> None:
        assert isinstance(self.candidate, Buffer)  # `__init__` has made it
        tensors = self.plan.tensors
        left = self.candidate.split(at for t in tensors for at in (t.start, t.stop))
        for tensor, variable in zip(tensors, self._variables, strict=True):
            variable.assign(left.read(tensor.start, tensor.stop), read_value=False)


class Unwritten(Arenas[Array]):
    """Arenas of one bucket that steps read at most, and the optimizer's update writes."""

    def __init__(self, plan: BucketPlan, variables: Sequence[Any]) -> None:
        residual = Unread(variables)
        super().__init__(plan, residual, residual)

    def swap(self) -> None:
        """Leave the variables as they are."""


class Unread(Buffer):
    """A flat buffer of variables, which are read when values are needed."""

    def __init__(self, variables: Sequence[Any]) -> None:
        self._variables, self.dtype = variables, variables[0].dtype
        self.numel = sum(variable.shape[0] for variable in variables)
        self.shape = tf.TensorShape([self.numel])

    @cached_property
    def _whole(self) -> Buffer:
        return Buffer.joined([variable.value() for variable in self._variables])

    @property
    def value(self) -> Any:
        """`Buffer.value`."""
        return self._whole.value

    def read(self, start: int, stop: int) -> Any:
        """`Buffer.read`."""
        return self._whole.read(start, stop)


class NumberArenas(Arenas[Array]):
    """Arenas of a few numbers for each tensor of a bucket, in rows of one variable.

    Args:
        plan: their layout.
        variable: the variable.
        rows: the row of each tensor.
        factors, moves: as in `VariableArenas`.
    """

    def __init__(
        self,
        plan: BucketPlan,
        variable: Any,
        rows: Sequence[int],
        factors: Any = None,
        moves: Any = None,
    ) -> None:
        filled = [at for at, tensor in enumerate(plan.tensors) if tensor.numel]
        self._rows = [rows[at] for at in filled]
        value = tf.gather(variable, tf.constant(self._rows, tf.int32))
        if factors is not None:
            value *= tf.gather(factors, tf.constant(filled, tf.int32))[:, tf.newaxis]
        residual = Buffer(tf.reshape(value, [plan.numel]))
        super().__init__(plan, residual, residual.copy())
        self._variable, self._moves = variable, moves

    def swap(self) -> None:
        """Assign the candidates to the variable."""
        shape = [len(self._rows), self._variable.shape[1]]
        value: Any = tf.reshape(self.candidate.value, shape)
        if self._moves is not None:
            before = tf.gather(self._variable, tf.constant(self._rows, tf.int32))
            value = tf.where(self._moves, value, before)
        if self._rows:
            self._variable.scatter_nd_update([[row] for row in self._rows], value)
        super().swap()


class VariableState(State[Array]):
    """`State` of one list of variables, whose state variables are made with each plan.

    Args:
        config: the method's settings.
        reduction: "average" or "sum" over ranks.
        names: names of all variables.
        stores: state variables by model variable.
        collective: collectives of the ranks that exchange.
        follows: the rule of the optimizer's update, if it depends on exchanges.
    """

    rates: VariableRates | None

    def __init__(
        self,
        config: Method,
        reduction: str,
        names: Sequence[str],
        stores: Stores,
        collective: Collective[Array],
        follows: Follows | None = None,
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
        super().__init__(config, reduction, self.ops, self.schedule_in_graphs, follows)
        self._names, self.later = names, set(names)
        self.rates = VariableRates(self._fall, names) if config.follow_lr else None
        self.last_squares = Squares()
        self._numbers = apart(_of_host) if set(HOST) & set(config.needed_measures) else None
        # SGD's losses, one for each of `names`, and what the update does to codes.
        self._losses, self._codes = apart(_of_update, len(names))
        # Variables of a few numbers for each of `names`, by part of the state and dtype.
        self._rows, self._row = dict[tuple[str, str], Any](), {n: i for i, n in enumerate(names)}
        self.arrived: dict[int, Rows] = {}  # measures of all ranks in the last step, by bucket
        self._specs: dict[str, TensorSpec] = {}

    def _fall(self, name: str) -> float:
        """`fall_of` a tensor."""
        return fall_of(self.config if self.plan is None else self.plan.config, name)

    def specs(self) -> dict[str, TensorSpec]:
        """`State.specs`."""
        return self._specs

    def wrapped(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """`State.wrapped`."""
        return converted(state, lambda array: Buffer(tf.convert_to_tensor(array)))

    def unwrapped(self, state: dict[str, Any]) -> dict[str, Any]:
        """`State.unwrapped`."""
        return converted(state, lambda array: array.value)

    @property
    def place(self) -> tuple[int, int]:
        """`State.place`."""
        return self.collective.rank, self.collective.size

    def squares(self) -> Squares:
        """`State.squares`: from the last step in which they were measured."""
        return self.last_squares

    def know(self, plan: Plan, variables: Mapping[str, Any]) -> None:
        """Make state variables for the tensors of a plan, and load their part of a state dict.

        variables: the model's variables, by tensor name.

        Raises:
            ShapeChangedError, UnsupportedDtypeError: a tensor's state variables do not fit it.
            StateDictError: the loaded state dict does not fit.
        """
        if self.exchange is None:
            self._choose_exchange(plan)
        for name, spec in declared(plan).items():
            self.parts.setdefault(METHOD_STATE + name, Part(self.ops)).spec = spec
        if self.config.momentum:
            check_dtypes(plan)
        for bucket in plan.buckets:
            self._lay_out(bucket, variables)
        specs = {t.spec.name: t.spec for t in plan.tensors()}
        self._specs |= {name: specs[name] for name in variables}
        for part in self.parts.values():
            part.pieces = {n: part.pieces[n] for n in self._names if n in part.pieces}
        self.meet([name for name in variables if name in self.later])

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
            own = factors, moves if stays else None
            shared = self._rows.get((key, bucket.residual_dtype))
            if shared is not None:
                return NumberArenas(bucket, shared, [self._row[name] for name in names], *own)
            variables = [self._variable(key, name, at) for name in names]
            if spec.in_place:
                return Unwritten(bucket, variables)
            return VariableArenas(bucket, variables, *own)

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
            stated = self.schedule_in_graphs.facts(plan.config.ratio, rate)
            codec.measures.state_facts(plan.buckets[0].ordinal, Buffer(stated))
        committed = None
        if isinstance(self.config, Seeded):
            committed = self.schedule_in_graphs.read()
        codec.draw_from(lambda: committed, partial(_rank_in_graph, self.config, self.collective))
        follow = None
        if isinstance(plan.follows, Rule):
            follow = Tracker(plan.follows, self.ops, lambda: moments).follow
        shared = self.ops, codec, exchange, name
        return Step(plan, storage, *shared, number=self._number, follow=follow)

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

    def is_followed(self, name: str) -> bool:
        """Whether a tensor's update depends on the exchange."""
        part = self.parts.get(METHOD_STATE + ARRIVALS)
        return part is not None and name in part.pieces

    def followed(self, names: Sequence[str]) -> Followed:
        """What the last step has told of followed tensors."""
        codes = [self._variable(METHOD_STATE + ARRIVALS, name, 0) for name in names]
        does = self._codes.read_value()
        if not self._normalises:
            places = [self._row[name] for name in names]
            return Followed(codes, None, tf.gather(self._losses, places), does)
        rows, wide = [self._row[name] for name in names], tf.float64
        every = (v for (key, _), v in self._rows.items() if key == METHOD_STATE + FACTORS)
        factors = tf.add_n([tf.cast(tf.gather(variable, rows), wide) for variable in every])
        return Followed(codes, factors, None, does)

    @property
    def _normalises(self) -> bool:
        return isinstance(self.follows, Rule) and self.follows.normalises

    def note_codes(self, plan: Plan, sound: Any) -> None:
        """Note in a graph what the update does to codes; sound: whether the step is committed."""
        if plan.follows is not None:
            sends_all = plan.config.ratio == 1.0 and not plan.config.withheld()
            self._codes.assign(
                tf.where(sound, Codes.FILL if sends_all else Codes.FOLLOW, Codes.STAY)
            )

    def _note_losses(self, plan: Plan, rates: StepRates | None) -> None:
        """Assign, in a step of SGD, the share that elements lose if they always arrive."""
        if plan.follows is None or self._normalises:
            return
        names = [tensor.spec.name for tensor in plan.tensors()]
        found = {n for each in plan.buckets for n in selecting(plan.config, each.gradients)}
        loses = tf.constant([float(name in found) for name in names], tf.float64)
        decays = tf.ones_like(loses) if rates is None else rates.decays(names)
        places = [[self._row[name]] for name in names]
        self._losses.scatter_nd_update(places, loses * formulas.loss_of(decays))

    def _renew_numbers(self) -> None:
        """Set the measures of the next step after a state was loaded."""
        if self._numbers is not None:
            known = {VERDICT: self.guard.verdict}
            self._numbers.assign([known.get(name, 0.0) for name in HOST])

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
        self._renew_numbers()

    def _choose_exchange(self, plan: Plan) -> None:
        """Choose the exchange together with all ranks."""
        self.exchange = exchange_of(plan, self.ops, self.collective)
        log.info("TopKEF: %s", describe(self.exchange))
        self.parts = {RESIDUALS: Part(self.ops)}
        if self.exchange.parts:
            self.parts[OWNED] = Part(self.ops)
        if self.config.momentum:
            self.parts[VELOCITY] = Part(self.ops)

    def _lay_out(self, bucket: BucketPlan, variables: Mapping[str, Any]) -> None:
        """Find or make the state variables of a bucket's tensors."""
        exchange, stores = self.exchange, self._stores
        assert exchange is not None
        sharded = tuple(map(str, exchange.owner.values())) if exchange.parts else None
        orders = {
            t.spec.name: None if sharded is None else (t.spec.name, sharded, self.reduction)
            for t in bucket.tensors
        }
        make = _Layout(bucket, variables)
        make(self.parts[RESIDUALS], stores.residuals, exchange.holders(bucket), orders)
        if OWNED in self.parts:
            make(self.parts[OWNED], stores.owned, exchange.owned(bucket), orders)
        if VELOCITY in self.parts:
            make(self.parts[VELOCITY], stores.velocities, (bucket,), {})
        for key, part in self.parts.items():
            if not key.startswith(METHOD_STATE):
                continue
            name = key.removeprefix(METHOD_STATE)
            laid_out = state_plan(bucket, name)
            if bucket.follows is None or part.spec is None or part.spec.in_place:
                make(part, stores.methods[name], (laid_out,), {})
            else:
                self._share_rows(key, laid_out)

    def _share_rows(self, key: str, laid_out: BucketPlan) -> None:
        """Find or make the rows of a bucket's tensors in the variable of one part."""
        part, dtype = self.parts[key], laid_out.residual_dtype
        if (key, dtype) not in self._rows:
            width = max(tensor.numel for tensor in laid_out.tensors)
            self._rows[key, dtype] = apart(_zeros_of, len(self._names), width, dtype)
        for tensor in laid_out.tensors:
            name, variable = tensor.spec.name, self._rows[key, dtype]
            part.specs[name] = tensor.spec
            part.pieces[name] = [RowPiece(variable, self._row[name], tensor.numel)]

    def _variable(self, key: str, name: str, at: int) -> Any:
        piece = self.parts[key].pieces[name][at]
        assert isinstance(piece, VariablePiece)
        return piece.variable


class _Layout:
    """Finds or makes one part's state variables of one bucket.

    Args:
        bucket: the bucket.
        variables: the model's variables, by tensor name.
    """

    def __init__(self, bucket: BucketPlan, variables: Mapping[str, Any]) -> None:
        self._bucket, self._variables = bucket, variables

    def __call__(
        self,
        part: Part[Array],
        store: Any,
        holders: Sequence[BucketPlan],
        orders: Mapping[str, object],
    ) -> None:
        """holders: plans that together hold the part; orders: shard orders, by tensor name."""
        for i, tensor in enumerate(self._bucket.tensors):
            spec, name = tensor.spec, tensor.spec.name
            own = [(holder, holder.tensors[i]) for holder in holders]
            part.specs[name] = own[0][1].spec if own else spec
            made: Sequence[Any] = ()
            if own:
                sizes = [each.numel for _, each in own]
                made = store.of(self._variables[name], part.specs[name], sizes, orders.get(name))
            part.pieces[name] = [
                VariablePiece(variable, holder.parts, each.first)
                for variable, (holder, each) in zip(made, own, strict=True)
            ]


def _rank_in_graph(config: Method, collective: Collective[Array]) -> int:
    """This rank, for the random numbers of a graph.

    Raises:
        ConfigError: the job is elastic, and ranks are numbered anew while graphs stay.
    """
    if elastic():
        raise ConfigError(
            f"{type(config).__name__} draws random numbers by the rank that a graph was built on, "
            "and this job is elastic",
            cure="Use a method whose random numbers are equal on all ranks, such as TopKEF (none) "
            "or RandomK, or run without --min-np and --max-np",
        )
    return collective.rank


def _of_update(count: int) -> tuple[Any, Any]:
    with tf.device("cpu"):
        losses = tf.Variable(tf.zeros([count], tf.float64), trainable=False)
        return losses, tf.Variable(Codes.FOLLOW, trainable=False, dtype=tf.int32)


def _zeros_of(count: int, width: int, dtype: str) -> Any:
    with tf.device("cpu"):
        return tf.Variable(tf.zeros([count, width], dtype), trainable=False)


def _of_host() -> Any:
    with tf.device("cpu"):
        return tf.Variable(tf.zeros([len(HOST)]), trainable=False)
