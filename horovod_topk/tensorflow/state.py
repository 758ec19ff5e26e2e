"""Error feedback behind one list of variables: how its gradients travel, and what is kept."""

from __future__ import annotations

import gc
import itertools
import logging
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from horovod_topk.config import TopKConfig
from horovod_topk.core.front import (
    check_all_exchange,
    check_elastic,
    check_kept,
    elastic,
    why_inactive,
)
from horovod_topk.core.plan import RESIDUAL_DTYPE, TensorSpec
from horovod_topk.core.rates import RATES, rates_of
from horovod_topk.core.state import Clock
from horovod_topk.core.state_dict import (
    ASKED,
    COMMITTED,
    asked_of,
    check_velocity,
    committed_of,
    pack_state,
    steps_of,
)
from horovod_topk.core.stats import Stats, StepCounters, count_step, planned
from horovod_topk.elastic import Keeper
from horovod_topk.errors import UnsupportedOperationError
from horovod_topk.ops.tensorflow import Buffer, TensorFlowOps
from horovod_topk.tensorflow.alone import alone, clipped_alone
from horovod_topk.tensorflow.collective import HorovodCollective
from horovod_topk.tensorflow.dicts import joined
from horovod_topk.tensorflow.graph import Route, norm_of, step
from horovod_topk.tensorflow.planning import Settings, names_of, spec_of, unwrap
from horovod_topk.tensorflow.rates import noted, rescaled, turned
from horovod_topk.tensorflow.residuals import Stores
from horovod_topk.tensorflow.routes import Routes
from horovod_topk.tensorflow.rungs import Rungs
from horovod_topk.tensorflow.scaling import is_dense

log = logging.getLogger("horovod_topk")

_COUNT = itertools.count()
_LIVE: weakref.WeakSet[OptimizerState] = weakref.WeakSet()


def live_states() -> list[OptimizerState]:
    """The states in this process that have exchanged something."""
    return list(_LIVE)


class OptimizerState:
    """Error-feedback state of one list of variables, as `TopKEF.of(...)` returns it."""

    framework = "tensorflow"

    def __init__(
        self,
        config: TopKConfig,
        variables: Sequence[Any],
        settings: Settings,
        stores: Stores,
    ) -> None:
        if not tf.compat.v1.executing_eagerly_outside_functions():
            raise UnsupportedOperationError(
                "TopKEF was used in a graph of TensorFlow 1, which has no eager mode around it",
                cure="Enable eager execution, and train in a tf.function",
            )
        self._config, self._settings = config, settings
        self._names = names_of(variables)
        self._stores = stores
        self._functions: dict[tuple[str, float], Callable[..., list[Any]]] = {}
        self._built: dict[str, Route] = {}  # those that graphs have, by name
        self._last: Route | None = None
        self._skipped: dict[str, str] = {}
        self._callbacks: list[Callable[[StepCounters], None]] = []
        self._steps = self._rolled_back = 0
        self._begun = 0  # steps of the run that a checkpoint was of, less those of this one
        self._before = 0  # steps of an elastic job that this state has not seen, less those undone
        self._gradient_norm = 0.0
        self.warnings: tuple[str, ...] = ()  # about the optimizer, told by the seam
        self.created = next(_COUNT)
        self.label = f"a TopKEF state of {len(self._names)} variables"
        reason = why_inactive(settings.process_set)
        self.active = reason is None
        self.keeper: Keeper | None = None  # in an elastic job whose state has this
        if reason is not None:
            self._skip("*", reason)
        check_elastic(config)
        collective = HorovodCollective(settings.process_set, resizable=elastic())
        self._ops, self._collective = TensorFlowOps(), collective
        self._rungs = Rungs(config)
        self._routes = Routes(config, settings, self._names, stores, self._ops, collective)

    # What a user may ask.

    def stats(self) -> Stats:
        """Return totals, sizes and norms so far, of this rank.

        It is no collective: it may be called on any rank.
        """
        transport = self._routes.transport
        if self._last is None or transport is None:
            skipped = dict(self._skipped)
            return Stats(active=self.active, skipped=skipped, warnings=self.warnings)
        kept = self._routes.kept()
        stats = replace(
            planned(self._last.plan, transport.exchange),
            steps=self._steps,
            rolled_back=self._rolled_back,
            residual_norm=self._norm_of(kept.residuals),
            owned_norm=self._norm_of(kept.owned),
            gradient_norm=self._gradient_norm,
            skipped=dict(self._skipped),
            warnings=self.warnings,
        )
        return stats if self.keeper is None else self.keeper.counted(stats)

    @property
    def clock(self) -> Clock:
        """Steps that were committed; in an elastic job nobody asks for a ratio."""
        committed = self._rungs.committed
        return self._before + self._steps if committed is None else committed, None

    def resume(self, clock: Clock, ranks: int) -> None:
        """Go on where an elastic job is; called by its keeper."""
        self._before = clock[0] - self._steps
        if self._rungs.committed is not None:
            self._rungs.go_on_from(clock[0])

    def keep_with(self, keeper: Keeper) -> None:
        """Take part in an elastic job; called by `TopKEF`.

        Raises:
            ConfigError: not all ranks exchange these gradients.
        """
        check_all_exchange(self._settings.process_set)
        self.keeper = keeper
        if keeper.units:
            self.resume(keeper.clock, keeper.units)

    @property
    def reduction(self) -> str:
        """Whether ranks' gradients are combined by "average" or "sum"."""
        return self._settings.reduction

    @property
    def tensors(self) -> dict[str, list[int]]:
        """Shapes of the compressed gradients by tensor name, of those seen so far."""
        return {name: list(spec.shape) for name, spec in self._routes.specs().items()}

    @property
    def steps(self) -> int:
        """Steps that have ended, committed or rolled back, also before a checkpoint was loaded.

        It is the same on every rank.
        """
        return self._begun + self._steps + self._rolled_back

    @property
    def ratio(self) -> float:
        """Share of each tensor's elements that the next step sends; see `set_ratio`."""
        return self._rungs.ratio if self.active else 1.0

    def set_ratio(self, ratio: float | None) -> None:
        """Send another share of elements from the next step on; None: follow the settings.

        Call it on every rank, between the same two steps. A step at 1.0 sends the whole residual at
        full precision, and leaves residuals of zero.

        Args:
            ratio: 1.0, `ratio` of the settings, or a ratio that `warmup` names.

        Raises:
            ConfigError: it is none of these, the job is elastic, or a tf.function was traced for
                one ratio alone: without `warmup`, `set_ratio(None)` has to come before it.
        """
        if self.active:
            self._rungs.ask(ratio)

    @property
    def place(self) -> tuple[int, int]:
        """This rank, and the number of ranks that exchange gradients."""
        return (self._collective.rank, self._collective.size) if self.active else (0, 1)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of this rank's residuals, flat, by tensor name; empty if inactive.

        Every rank has residuals of its own, so save one file a rank.
        """
        if not self.active:
            return {}
        shares, waiting = self._routes.shares, self._routes.waiting or {}
        if shares is None:
            return self._counted(dict(waiting) or pack_state(self._config.ratio, [], {}))
        kept = self._routes.kept()
        copies = {name: shares.natural(name, e) for name, e in kept.residuals.items()}
        specs = self._routes.specs().values() if shares.keeps else ()
        state = pack_state(self._config.ratio, specs, copies)
        if shares.owner is not None:
            own = self._packed(shares.owned(self._routes.specs().values()), kept.owned, "owned")
            state["owned"] = shares.owner | own
        if self._config.momentum:
            state["velocity"] = self._packed(specs, kept.velocities, "velocity")
        return self._counted(joined(state, waiting))

    def _packed(
        self, specs: Iterable[TensorSpec], kept: Mapping[str, Any], part: str
    ) -> dict[str, Any]:
        """A state dict within the state dict."""
        copies = {name: tf.identity(e) for name, e in kept.items()}
        packed = pack_state(self._config.ratio, specs, copies)
        return joined(packed, (self._routes.waiting or {}).get(part, {}))

    def _counted(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state dict with what ratios follow from, and the rates that residuals follow."""
        committed = self._rungs.committed
        if committed is not None:
            state = state | {COMMITTED: committed}
        if self._rungs.asked is not None:
            state = state | {ASKED: self._rungs.asked}
        if self._config.follow_lr:
            waiting = rates_of(self._routes.waiting or {})
            state = state | {RATES: {**waiting, **noted(self._routes.kept().units)}}
        return state

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Refuse a state dict that does not fit, once it is known what would; StateDictError."""
        committed_of(state, 0)
        asked_of(state)
        rates_of(state)
        check_velocity(bool(self._config.momentum), state)
        if self._routes.shares is not None:
            self._routes.check(state, list(self._routes.specs().values()), self._routes.shares)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load residuals that this rank saved; before the first step they are kept until then.

        Raises:
            StateDictError: a tensor is missing, unknown or of another shape; nothing has changed.
        """
        if not self.active:
            return
        self.check_state_dict(state)
        self._rungs.go_on_at(asked_of(state))
        self._rungs.go_on_from(committed_of(state, self._rungs.committed or 0))
        self._begun += steps_of(state, self.steps) - self.steps
        if self._routes.shares is not None:
            self._routes.kept().assign(state, self._routes.shares)
        else:
            self._routes.waiting = state

    def reset(self) -> None:
        """Set all residuals to zero. Call it on every rank."""
        self._routes.waiting = None
        self._routes.kept().reset()

    def residual(self, name: str) -> Any:
        """Return a copy of one tensor's residual.

        Args:
            name: of the variable, as in `tensors`.

        Returns:
            [numel] float32, or float64 for a float64 gradient.

        Raises:
            KeyError: no such tensor is compressed.
        """
        spec, shares = self._routes.specs()[name], self._routes.shares
        if shares is None or not shares.keeps:
            return tf.zeros([spec.numel], RESIDUAL_DTYPE[spec.dtype])
        return shares.natural(name, self._routes.kept().residuals[name])

    def on_step(self, callback: Callable[[StepCounters], None]) -> None:
        """Call `callback` with the counters of each step, at its end, in the thread of the step."""
        self._callbacks.append(callback)

    # What the seam calls.

    def exchange(
        self, gradients: Sequence[Any], variables: Sequence[Any], rate: Any = None
    ) -> list[Any]:
        """Exchanged gradients, in a graph or at once; None where there is none or a sparse one.

        Args:
            gradients: one a variable.
            variables: in the order of all calls.
            rate: the learning rate, [] float64, if residuals follow it.

        Raises:
            ShapeChangedError, UnsupportedDtypeError: the gradients cannot be compressed.
            PlanMismatchError: ranks disagree on what they exchange.
            PayloadError: another rank's bytes are no payload. While a tf.function runs, TensorFlow
                hands on the text of this one alone, in an error of its own.
        """
        mine = [i for i, gradient in enumerate(gradients) if is_dense(gradient)]
        self._note_skipped(gradients)
        result: list[Any] = [None] * len(gradients)
        if mine:
            dense, theirs = [gradients[i] for i in mine], [unwrap(variables[i]) for i in mine]
            route = self._route([self._names[i] for i in mine], dense, theirs)
            for i, exchanged in zip(mine, self._run(route, dense, rate), strict=True):
                result[i] = exchanged
        return result

    def alone(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Gradients as the optimizer is to have them where nothing is compressed."""
        if self._config.clip_norm is not None:
            gradients = clipped_alone(gradients, self._config.clip_norm)
        if not self._config.momentum:
            return list(gradients)
        return alone(gradients, variables, self._names, self._config, self._stores.velocities)

    def _run(self, route: Route, gradients: list[Any], rate: Any) -> list[Any]:
        if not tf.executing_eagerly():
            return list(self._rungs.traced(lambda rung: self._build(route, rung, gradients, rate)))
        ratio = self._rungs.ratio
        key = route.name, ratio
        if key not in self._functions:
            self._functions[key] = tf.function(
                lambda dense, lr: self._build(route, ratio, dense, lr), autograph=False
            )
        self._ops.raised = None
        try:
            return self._functions[key](gradients, rate)
        except tf.errors.OpError:
            if self._ops.raised is not None:
                raise self._ops.raised from None
            raise

    def _route(self, names: list[str], gradients: list[Any], variables: list[Any]) -> Route:
        """The way for these gradients; all ranks agree on it when it is first taken."""
        pairs = zip(names, gradients, variables, strict=True)
        specs = tuple(spec_of(name, gradient, variable) for name, gradient, variable in pairs)
        route = self._routes.get(specs)
        if route is None:
            if self._config.warmup is not None:
                check_kept(self.keeper, "warmup= counts steps, of which")
            if elastic():
                gc.collect()  # a rank that joins has no dead optimizers to tell its names from
            live = [route for state in live_states() for route in state._routes]
            route = self._routes.make(specs, variables, live)
            self._skipped |= route.plan.sent_dense()
            _LIVE.add(self)
        self._last = route
        return route

    def _build(self, route: Route, ratio: float, gradients: list[Any], rate: Any) -> list[Any]:
        """One step as a graph, and its end on the host."""
        route = route.at(ratio)
        transport = self._routes.transport
        assert transport is not None  # a route is made with it
        with tf.name_scope("topkef"):
            besides = [*self._rungs.counted(), *turned(route, rate)]
            owed = rescaled(route, rate)
            exchanged, flags = step(route, gradients, transport, besides, owed)
            self._built[route.name] = route
            # TensorFlow keeps this function, and Keras 3 its graphs, until the process ends.
            this, name = weakref.ref(self), route.name

            def count(flags: Any, norm: Any) -> None:
                state = this()
                if state is not None:
                    state._count(state._built[name], flags, norm)

            tf.py_function(count, [flags, norm_of(gradients)], [])
            return exchanged

    def _count(self, route: Route, flags: Any, norm: Any) -> None:
        """Note the end of a step, on the host."""
        transport = self._routes.transport
        assert transport is not None
        self._last, plan = route, route.plan
        flagged = [bool(flag) for flag in flags.numpy()]
        self._gradient_norm = float(norm)
        self._steps += not any(flagged)
        self._rolled_back += any(flagged)
        names = [t.spec.name for t in plan.tensors()]
        counters = count_step(
            self._steps + self._rolled_back,
            not any(flagged),
            transport.exchange.traffic(plan),
            [name for name, flag in zip(names, flagged, strict=True) if flag],
        )
        for callback in self._callbacks:
            callback(counters)

    def _norm_of(self, variables: Mapping[str, Any]) -> float:
        return math.hypot(*(self._ops.norm(Buffer(each)) for each in variables.values()))

    def _note_skipped(self, gradients: Sequence[Any]) -> None:
        for name, gradient in zip(self._names, gradients, strict=True):
            if isinstance(gradient, tf.IndexedSlices) and name not in self._skipped:
                self._skip(name, "sparse gradient: exchanged by Horovod's own allgather")

    def _skip(self, name: str, reason: str) -> None:
        self._skipped[name] = reason
        log.warning("TopKEF does not compress %s: %s", name, reason)
