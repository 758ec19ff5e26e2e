"""State of error feedback in tf.Variables that a graph reads and assigns."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import tensorflow as tf

from horovod_topk.config import SGD
from horovod_topk.core.arrivals import (
    ARRIVALS,
    FACTORS,
    LOSS,
    NORMS,
    Arrived,
    ArrivedToSgd,
    selecting,
)
from horovod_topk.core.base_compressor import elastic
from horovod_topk.core.codec import PayloadCodec
from horovod_topk.core.exchange import Collective
from horovod_topk.core.exchange.selection import exchange_of
from horovod_topk.core.measures import HOST, VERDICT, Rows
from horovod_topk.core.momentum import Momenta, Momentum, check_dtypes
from horovod_topk.core.part import Part
from horovod_topk.core.plan import BucketPlan, Plan, TensorSpec
from horovod_topk.core.rates import fall_of
from horovod_topk.core.residual import Arenas, Squares
from horovod_topk.core.rounds import is_shared, state_names, state_plan
from horovod_topk.core.state import State
from horovod_topk.core.state_dict import METHOD_STATE, OWNED, RESIDUALS, SHARED, VELOCITY, converted
from horovod_topk.core.stats import describe
from horovod_topk.core.step import Step, Storage
from horovod_topk.errors import ConfigError
from horovod_topk.methods.protocol import Method, Seeded
from horovod_topk.ops.tensorflow import Array, Buffer, TensorFlowOps
from horovod_topk.tensorflow.learning_rates import StepRates, VariableRates
from horovod_topk.tensorflow.timing import GraphTimer
from horovod_topk.tensorflow.traced_schedule import TracedSchedule
from horovod_topk.tensorflow.variables import Stores, VariablePiece, apart

log = logging.getLogger("horovod_topk")


class VariableArenas(Arenas[Array]):
    """Arenas of one bucket in one graph: read from variables, and assigned when it commits.

    Args:
        plan: the bucket.
        variables: one state variable for each tensor of the plan.
        factors: a factor for each variable's value, of the same dtype; None: all are 1.
        moves: whether the step may change the variables, [] bool; None: it may.
    """

    def __init__(
        self,
        plan: BucketPlan,
        variables: Sequence[Any],
        factors: Sequence[Any] | None = None,
        moves: Any = None,
    ) -> None:
        parts, stop = [], 0
        for i, (tensor, variable) in enumerate(zip(plan.tensors, variables, strict=True)):
            if tensor.start > stop:  # a gap, for alignment
                parts.append(tf.zeros([tensor.start - stop], variable.dtype))
            value = variable.value()
            parts.append(value if factors is None else value * factors[i])
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


class VariableState(State[Array]):
    """`State` of one list of variables, whose state variables are made with each plan.

    Args:
        config: the method's settings.
        reduction: "average" or "sum" over ranks.
        names: names of all variables.
        stores: state variables by model variable.
        collective: collectives of the ranks that exchange.
    """

    rates: VariableRates | None

    def __init__(
        self,
        config: Method,
        reduction: str,
        names: Sequence[str],
        stores: Stores,
        collective: Collective[Array],
    ) -> None:
        if config.probe_every is not None:
            raise ConfigError(
                f"probe_every={config.probe_every} was given, and TensorFlow has no probe",
                cure="Leave probe_every= out, or probe in PyTorch",
            )
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
        super().__init__(config, reduction, self.ops, self.schedule_in_graphs)
        self._names, self.later = names, set(names)
        self.rates = VariableRates(self._fall) if config.follow_lr else None
        self.last_squares = Squares()
        self._numbers = apart(_of_host) if set(HOST) & set(config.needed_measures) else None
        # By tensor name: share of its gradient that an element loses if it always arrives (SGD).
        self._losses: dict[str, Any] = {}
        self._begins = apart(lambda: tf.Variable(0.0, False))  # 1 if arrivals begin with it
        # Number of committed steps when they do, or -1.
        self._begin_after = apart(lambda: tf.Variable(0, trainable=False, dtype=tf.int64))
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
        for name in state_names(plan):
            part = self.parts.setdefault(METHOD_STATE + name, Part(self.ops))
            part.facts = {SHARED: is_shared(plan, name)}
        if self.config.momentum:
            check_dtypes(plan)
        for bucket in plan.buckets:
            self._lay_out(bucket, variables)
        specs = {t.spec.name: t.spec for t in plan.tensors()}
        self._specs |= {name: specs[name] for name in variables}
        for part in self.parts.values():
            part.pieces = {n: part.pieces[n] for n in self._names if n in part.pieces}
        self.meet([name for name in variables if name in self.later])
        self._note_whether_new()

    def has_changed(self) -> None:
        """`State.has_changed`."""
        self._note_whether_new()

    def _note_whether_new(self) -> None:
        """Note whether arrivals of a tensor begin anew: the state that was loaded had none."""
        part = self.parts.get(METHOD_STATE + ARRIVALS)
        if self.config.by_arrivals != SGD or part is None:
            return
        with tf.init_scope():
            known = [tf.reduce_any(part.residual(name).value > 0) for name in part.pieces]
            is_new = not all(map(bool, known))
            self._begin_after.assign(self.counter.committed if is_new else -1)

    def step(
        self,
        plan: Plan,
        name: str,
        rates: StepRates | None = None,
        squares: Mapping[str, Any] = MappingProxyType({}),
        *,
        moves: Any = None,
    ) -> Step[Array]:
        """Make a step over the state variables, for one graph.

        Args:
            plan: the buckets, with the settings of the step.
            name: prefix of the collectives' names.
            rates: learning rates of the step, if residuals are rescaled by them.
            squares: Adam's mean square of each tensor, or None, by name.
            moves: whether the learning rate is other than 0, [] bool; None: it is not known. At 0,
                residuals and mean norms stay; velocities and arrivals change, as the optimizer's
                moments do.
        """
        exchange = self.exchange
        assert exchange is not None  # `know` has chosen it
        self._note_losses(plan, rates)

        def arenas_of(
            key: str, bucket: BucketPlan, at: int, rates: StepRates | None, least: float = 0.0
        ) -> VariableArenas:
            names = [tensor.spec.name for tensor in bucket.tensors]
            variables = [self._variable(key, name, at) for name in names]
            stays = moves is not None and key in (RESIDUALS, OWNED, METHOD_STATE + NORMS)
            factors = None
            if rates is not None:
                factors = rates.factors(names, bucket.residual_dtype, least)
            elif stays and key in (RESIDUALS, OWNED):
                factors = [tf.cast(moves, bucket.residual_dtype)] * len(names)
            return VariableArenas(bucket, variables, factors, moves if stays else None)

        def state_of(name: str, bucket: BucketPlan) -> VariableArenas:
            # What has waited may arrive as large as it is now.
            rescaled = (rates, 1.0) if name == NORMS else (None,)
            return arenas_of(METHOD_STATE + name, state_plan(bucket, name), 0, *rescaled)

        def storage(bucket: BucketPlan) -> Storage[Array]:
            holders, owned = exchange.holders(bucket), exchange.owned(bucket)
            return Storage(
                [arenas_of(RESIDUALS, each, at, rates) for at, each in enumerate(holders)],
                [arenas_of(OWNED, each, 0, rates) for each in owned],
                arenas_of(VELOCITY, bucket, 0, None) if plan.config.momentum else None,
                {each: state_of(each, bucket) for each in state_names(plan)},
            )

        def decay(name: str) -> Any:
            return 1.0 if rates is None else rates.decays([name])[0]

        codec = PayloadCodec(self.ops, self.arrived)
        if self.states_facts:
            rate = None if rates is None else rates.rate
            stated = self.schedule_in_graphs.facts(plan.config.ratio, rate)
            codec.state_facts(plan.buckets[0].ordinal, Buffer(stated))
        committed = None
        if isinstance(self.config, Seeded):
            committed = self.schedule_in_graphs.read()
        codec.draw_from(lambda: committed, partial(_rank_in_graph, self.config, self.collective))
        known, beta2 = [(n, v) for n, v in squares.items() if v is not None], plan.config.beta2
        own = {n: Momentum(beta2, Buffer(v)) for n, v in known}
        momenta = Momenta(plan.config, lambda: own)
        momenta.turn()
        shared = self.ops, codec, exchange, name, momenta
        return Step(plan, storage, *shared, decay=decay, number=self._number)

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

    def arrivals_of(self, name: str) -> Arrived[Any] | ArrivedToSgd[Any] | None:
        """What an update needs to know of a tensor's arrivals; None: it is not followed."""
        key = METHOD_STATE + ARRIVALS
        if key not in self.parts or name not in self.parts[key].pieces:
            return None
        phi = self._variable(key, name, 0)
        if self.config.follows_energies:
            return Arrived(phi, self._variable(METHOD_STATE + FACTORS, name, 0))
        return ArrivedToSgd(phi, self._losses[name], self._begins)

    def _note_losses(self, plan: Plan, rates: StepRates | None) -> None:
        """Assign, in a step of SGD, the share that elements lose if they always arrive."""
        if self.config.by_arrivals != SGD:
            return
        begins = self.schedule_in_graphs.read() == self._begin_after.read_value()
        self._begins.assign(tf.cast(begins, tf.float32))
        for bucket in plan.buckets:
            names = [each.spec.name for each in bucket.gradients]
            found = selecting(plan.config, bucket.gradients)
            known = [LOSS * (name in found) for name in names]
            losses = known if rates is None else tf.unstack(known * rates.decays(names) ** 2)
            for name, loss in zip(names, losses, strict=True):
                self._losses[name].assign(loss, read_value=False)

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
        for key in self.parts:
            if key.startswith(METHOD_STATE):
                name = key.removeprefix(METHOD_STATE)
                make(self.parts[key], stores.methods[name], (state_plan(bucket, name),), {})
        for name in (t.spec.name for t in bucket.tensors if self.config.by_arrivals == SGD):
            self._losses.setdefault(name, apart(lambda: tf.Variable(0.0, False, dtype="float64")))
        if self.rates is not None:
            for spec in (tensor.spec for tensor in bucket.tensors):
                rates = replace(spec, shape=(2,), dtype="float64")
                (pair,) = stores.rates.of(variables[spec.name], rates, [2])
                self.rates.variables[spec.name] = pair

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
                made = store.of(self._variables[name], spec, sizes, orders.get(name))
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


def _of_host() -> Any:
    with tf.device("cpu"):
        return tf.Variable(tf.zeros([len(HOST)]), trainable=False)
