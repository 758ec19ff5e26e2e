"""Error feedback of one list of variables: exchanges their gradients in graphs or eagerly."""

from __future__ import annotations

import gc
import itertools
import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from horovod_topk.core.codec.measures import HOST
from horovod_topk.core.control.allocation import is_due
from horovod_topk.core.exchange.agreement import agree
from horovod_topk.core.exchange.membership import check_elastic, check_steps_kept, elastic
from horovod_topk.core.run.attached import Attached
from horovod_topk.core.run.timing import Seconds
from horovod_topk.core.state.residual import Squares
from horovod_topk.core.state.state_dict import VARIABLES, renamed
from horovod_topk.errors import UnsupportedOperationError
from horovod_topk.methods.protocol import Allocation, Method
from horovod_topk.ops.tensorflow import Array, Buffer
from horovod_topk.tensorflow.collective import HorovodCollective
from horovod_topk.tensorflow.gradients import clip, clipped_alone, is_dense, with_momentum
from horovod_topk.tensorflow.planning import (
    CachedPlan,
    Specs,
    TapeSettings,
    names_of,
    plan_of,
    shapes_of,
    spec_of,
    unwrap,
)
from horovod_topk.tensorflow.refusals import refuse_allocation
from horovod_topk.tensorflow.state_variables import VariableState
from horovod_topk.tensorflow.variables import Stores
from horovod_topk.updates.tensorflow import UpdateInputs
from horovod_topk.updates.tracker import Moments

log = logging.getLogger("horovod_topk")

MEASURED = 16  # one step in so many measures norms, which takes passes over memory

CREATED, LOADS = itertools.count(), itertools.count(1)
_LIVE: weakref.WeakSet[OptimizerState] = weakref.WeakSet()


def live_states() -> list[OptimizerState]:
    """States in this process that have exchanged gradients."""
    return list(_LIVE)


class OptimizerState(Attached[VariableState]):
    """Error-feedback state of one list of variables, as `TopKEF.of(...)` returns it."""

    framework = "tensorflow"

    def __init__(
        self, config: Method, variables: Sequence[Any], settings: TapeSettings, stores: Stores
    ) -> None:
        if not tf.compat.v1.executing_eagerly_outside_functions():
            raise UnsupportedOperationError(
                "TopKEF was used in a graph of TensorFlow 1, which has no eager mode around it",
                cure="Enable eager execution, and train in a tf.function",
            )
        label = f"a TopKEF state of {len(variables)} variables"
        super().__init__(settings.process_set, settings.reduction, label)
        self._config, self._settings, self._stores = config, settings, stores
        self._names = names = names_of(variables)
        self._known = {VARIABLES: names, "shapes": shapes_of(names, variables)}
        self._name_of = {id(unwrap(v)): name for v, name in zip(variables, names, strict=True)}
        self._functions: dict[tuple[object, ...], Callable[..., list[Any]]] = {}
        self._traced: dict[tuple[object, ...], CachedPlan] = {}  # plans of the traced graphs
        self._raised: Exception | None = None  # error of the last step
        self._ended: float | None = None  # end of the last step, by `time.perf_counter`
        self.created = next(CREATED)
        check_elastic(config, in_graphs=True)
        collective = HorovodCollective(settings.process_set, resizable=elastic())
        by_name = dict(zip(names, variables, strict=True))
        shared = settings.reduction, by_name, stores, collective
        self._state = VariableState(config, *shared, settings.update_rule)
        self._plans: dict[Specs, CachedPlan] = {}  # one for each set of gradients

    def state_dict(self) -> dict[str, Any]:
        """As `Attached.state_dict`, with the names of all variables."""
        return super().state_dict() | {VARIABLES: [*self._names]} if self.active else {}

    def load_state_dict(self, state: Mapping[str, Any], load: int = 0) -> None:
        """As `Attached.load_state_dict`; a loaded model's variables may have other names.

        load: number of the load, of which the states of several lists may be parts; 0: a new one.
        """
        self._state.load = load or next(LOADS)
        super().load_state_dict(renamed(state, self._known))

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise StateDictError if a state dict does not fit the tensors known so far."""
        if self.active:
            self._state.check_state_dict(renamed(state, self._known))

    def residual(self, name: str) -> Any:
        """As `Attached.residual`."""
        return super().residual(name).value

    # Methods that the patched optimizers and tapes call.

    def exchange(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        rate: Any = None,
        beta2: float = 0.0,
        squares: Sequence[Any] = (),
    ) -> list[Any]:
        """Return exchanged gradients, in a graph or eagerly; None for a missing or sparse gradient.

        Args:
            gradients: one a variable.
            variables: the state's variables, or some of them.
            rate: the learning rate, [] float64; None: it is not known.
            beta2: Adam's; 0 with other optimizers.
            squares: Adam's mean square of each variable, or None; empty: with other optimizers.

        Raises:
            ShapeChangedError, UnsupportedDtypeError: the gradients cannot be compressed.
            PlanMismatchError: ranks disagree on what they exchange.
            PayloadError: another rank's bytes are no payload. While a tf.function runs, TensorFlow
                raises an error of its own with the text of this one. This rank finishes the step,
                with flags for every tensor, so that no other rank waits for it.
        """
        mine = [i for i, gradient in enumerate(gradients) if is_dense(gradient)]
        names = self._names_of(variables)
        self._note_skipped(names, gradients)
        result: list[Any] = [None] * len(gradients)
        if mine:
            dense, theirs = [gradients[i] for i in mine], [unwrap(variables[i]) for i in mine]
            cached = self._plan([names[i] for i in mine], dense, theirs)
            known = [squares[i] for i in mine] if squares else []
            given = dense, rate, beta2, known
            for i, exchanged in zip(mine, self._run(cached, *given), strict=True):
                result[i] = exchanged
        return result

    def is_adapted(self, variable: Any) -> bool:
        """Whether the update of a variable of the model depends on the exchange."""
        return self._state.is_adapted(self._name_of[id(variable)])

    def update_inputs(self, variables: Sequence[Any]) -> UpdateInputs:
        """As `VariableState.followed`, for variables of the model."""
        return self._state.update_inputs(self._names_of(variables))

    def alone(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Gradients for the optimizer if nothing is compressed: clipped, and with momentum."""
        if self._config.clip_norm is not None:
            gradients = clipped_alone(gradients, self._config.clip_norm)
        if not self._config.momentum:
            return list(gradients)
        names, velocities = self._names_of(variables), self._stores.velocities
        return with_momentum(gradients, variables, names, self._config, velocities)

    def _run(self, cached: CachedPlan, *given: Any) -> list[Any]:
        state = self._state
        if not tf.executing_eagerly():
            refuse_allocation(allocates=state.allocates)
            return self._function(cached, None)(*given)
        before = state.counter.committed if state.allocates else 0
        self._raised = None
        try:
            exchanged = self._function(cached, state.ratio)(*given)
        except tf.errors.OpError:
            if self._raised is not None:
                raise self._raised from None
            raise
        if state.allocates and is_due(before + 1) and state.counter.committed > before:
            pairs = zip(cached.specs, map(Buffer, exchanged), strict=True)
            state.allocate(cached.plan, {spec.name: state.ops.square(g) for spec, g in pairs})
        return exchanged

    def _function(self, cached: CachedPlan, ratio: float | None) -> Callable[..., list[Any]]:
        """Return the function that runs a step at a ratio level; all traces of the step call it.

        A graph has the number of ranks and the allocation as constants, so others have their own
        function.

        ratio: ratio of the level; None: the level is chosen when the function runs.
        """
        allocation, this = self._state.allocation, weakref.ref(self)
        key = cached.name, ratio, allocation, self._state.collective.size
        if key not in self._functions:

            def build(*given: Any) -> Any:
                state = this()
                assert state is not None  # it traces this function
                if ratio is not None:
                    return state._build(cached, ratio, allocation, *given)
                schedule = state._state.schedule_in_graphs
                return schedule.traced(lambda each: state._build(cached, each, (), *given))

            self._functions[key] = tf.function(build, autograph=False)
        return self._functions[key]

    def _plan(self, names: list[str], gradients: list[Any], variables: list[Any]) -> CachedPlan:
        """Return the plan for these gradients; all ranks agree on it when it is first needed."""
        triples = zip(names, gradients, variables, strict=True)
        specs = tuple(spec_of(name, gradient, variable) for name, gradient, variable in triples)
        cached = self._plans.get(specs)
        if cached is None:
            check_steps_kept(self._config, self.manager)
            if elastic():
                gc.collect()  # names count dead optimizers, and joining ranks have none
            cached = self._plans[specs] = self._make_plan(specs, variables)
            log.info("TopKEF %s: %s", cached.name, cached.plan.summary())
            self._skipped |= cached.plan.sent_dense()
            _LIVE.add(self)
        self._state.plan = cached.plan
        return cached

    def _make_plan(self, specs: Specs, variables: Sequence[Any]) -> CachedPlan:
        """Make a new plan, on which all ranks agree."""
        plan = plan_of(specs, variables, self._config, self._settings, self._names)
        prefix = self._config.name or f"topkef.{plan.digest.hex()}"
        live = (each for state in live_states() for each in state._plans.values())
        ordinal = max((each.ordinal for each in live if each.prefix == prefix), default=-1) + 1
        by_name = {spec.name: v for spec, v in zip(specs, variables, strict=True)}
        with tf.init_scope():  # run eagerly, also while a graph is being built
            if not elastic():  # in elastic jobs, ranks that join late make their plans alone
                own = self._state.ops, self._state.collective
                ordinal = agree(plan, ordinal, *own, optimizer=self._settings.optimizer)
            self._state.know(plan, by_name)
        return CachedPlan(specs, plan, prefix, ordinal)

    def _build(
        self,
        cached: CachedPlan,
        ratio: float,
        allocation: Allocation,
        gradients: list[Any],
        rate: Any,
        beta2: float,
        squares: list[Any],
    ) -> Any:
        """Build the graph of one step, with the function that ends it on the host."""
        cached = cached.at(ratio, allocation)
        with tf.name_scope("topkef"):
            due = tf.equal(self._state.schedule_in_graphs.read() % MEASURED, 0)
            moments = {
                spec.name: Moments(beta2, None if v is None else Buffer(v))
                for spec, v in zip(cached.specs if squares else (), squares, strict=True)
            }
            given = cached, gradients, self._state, due, rate, moments
            exchanged, flags, sums = _step(*given)
            times, seconds_of = self._state.timer.times(exchanged)
            # TensorFlow keeps this function, and Keras 3 its graphs, until the process ends.
            this, key = weakref.ref(self), (cached.name, ratio, allocation)
            self._traced[key] = cached

            def count(flags: Any, sums: Any, times: Any) -> tuple[int, int, list[float]]:
                state = this()
                if state is None:
                    return -1, 0, [0.0] * len(HOST)
                seconds = seconds_of(times.numpy().tolist())
                return state._count(state._traced[key], flags, sums.numpy(), seconds)

            arguments, kinds = [flags, sums, times], [tf.int32, tf.int32, tf.float32]
            level, stage, numbers = tf.py_function(count, arguments, kinds)
            self._state.schedule_in_graphs.take(level)
            self._state.schedule_in_graphs.enter(tf.ensure_shape(stage, []))
            self._state.take_numbers(numbers)
            with tf.control_dependencies([level]):  # it raises errors of the step
                return list(tf.identity_n(exchanged))

    def _count(
        self, cached: CachedPlan, flags: Any, squares: Any, seconds: Seconds
    ) -> tuple[int, int, list[float]]:
        """Count the end of a step, on the host; raise an error that `TensorFlowOps` has deferred.

        Returns:
            Position of the level that the schedule has decided on, -1: no decision; the guard's
            stage in the next step; and this rank's measures for the next step.
        """
        state, plan = self._state, cached.plan
        self._raised, state.ops.raised = state.ops.raised, None
        if self._raised is not None:
            raise self._raised
        assert state.exchange is not None  # it has exchanged these gradients
        state.plan = plan
        if squares[0] >= 0.0:
            *sums, decay = map(float, squares)
            state.last_squares = Squares(*sums)
            state.take_sample(state.last_squares, decay)
        names = [tensor.spec.name for tensor in plan.tensors()]
        pairs = zip(names, flags.numpy(), strict=True)
        flagged = [name for name, flag in pairs if flag]
        fell_back = state.decide(plan, state.arrived, flagged, committed=not flagged)
        traffic = state.exchange.traffic(plan)
        state.end_step(
            traffic, flagged, committed=not flagged, seconds=seconds, fell_back=fell_back
        )
        now, before, self._ended = time.perf_counter(), self._ended, time.perf_counter()
        numbers = [seconds.exposed_seconds, now - (before or now), state.guard.tell()]
        return state.schedule_in_graphs.decided, int(state.guard.memory.stage), numbers

    def _names_of(self, variables: Sequence[Any]) -> list[str]:
        return [self._name_of[id(unwrap(each))] for each in variables]

    def _note_skipped(self, names: Sequence[str], gradients: Sequence[Any]) -> None:
        for name, gradient in zip(names, gradients, strict=True):
            if isinstance(gradient, tf.IndexedSlices) and name not in self._skipped:
                self._skip(name, "sparse gradient: exchanged by Horovod's own allgather")


def _step(
    cached: CachedPlan,
    gradients: Sequence[Any],
    state: VariableState,
    due: Any,
    rate: Any,
    moments: Mapping[str, Moments],
) -> tuple[list[Any], Any, Any]:
    """Build the graph of one step: encode, exchange, decode, and commit unless a rank was flagged.

    All that differs from step to step is read when the graph runs.

    Args:
        cached: the plan.
        gradients: one gradient for each tensor, in the order of `cached.specs`.
        state: the state variables, which a finite step updates.
        due: whether to measure `Squares` in this step, [] bool.
        rate: the learning rate, [] float64; None: it is not known. At 0, gradients are exchanged
            alone, and residuals stay as they are.
        moments: what is known of Adam's second moments, by tensor name.

    Returns:
        The exchanged gradients; one flag for each tensor, bucket by bucket, True where a rank had a
        NaN or an infinity (the state is then unchanged, bit for bit); and `Squares` and the largest
        present learning rate as a share of its maximum, [4] float64, below zero where they were not
        measured.
    """
    plan = cached.plan
    arrays: dict[str, Array] = {
        spec.name: Buffer(_shaped(gradient, spec.shape))
        for spec, gradient in zip(cached.specs, gradients, strict=True)
    }
    if plan.config.clip_norm is not None:
        clip(list(arrays.values()), plan.config.clip_norm, plan.reduction, state.collective.size)
    of = {b.ordinal: [arrays[t.spec.name] for t in b.tensors] for b in plan.buckets}
    rates = state.rates_at(plan, rate)
    moves = None if rate is None else tf.not_equal(rate, 0.0)
    run = state.step(plan, cached.name, rates, moments, moves=moves)
    timer = state.timer
    timer.begin()
    run.update_measures()
    for ordinal, own in of.items():
        timer.note_ready([array.value for array in own])
        run.begin(ordinal, own)
    flagged: Any = tf.concat(run.finish(of), 0)

    def commit() -> None:
        run.commit()
        state.schedule_in_graphs.count()
        if rates is not None:
            rates.take_on()

    def measure() -> Any:
        squares = run.squares()
        decay = 1.0 if rates is None else rates.largest_decay
        each = squares.gradient, squares.compensated, squares.left, decay
        return tf.stack([tf.convert_to_tensor(square, tf.float64) for square in each])

    sound = tf.logical_not(tf.reduce_any(flagged))
    state.note_codes(plan, sound)
    tf.cond(sound, commit, lambda: None)
    unknown = tf.fill([4], tf.constant(-1.0, tf.float64))
    squares = tf.cond(tf.logical_and(due, sound), measure, lambda: unknown)
    exchanged = [arrays[spec.name].value for spec in cached.specs]
    return exchanged, flagged, squares


def _shaped(gradient: Any, shape: tuple[int, ...]) -> Any:
    return gradient if gradient.shape == shape else tf.ensure_shape(gradient, shape)
