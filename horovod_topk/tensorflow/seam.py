"""The one module that calls and wraps Horovod's private functions.

`_make_allreduce_grads_fn` makes the function that gets gradients with their variables; the gradient
tape, the optimizers and the local aggregation all call it when they are built. Wrapped are:

    horovod.tensorflow._make_allreduce_grads_fn       return an exchange of ours for TopKEF
    horovod._keras.create_distributed_optimizer       refuse TopKEF where it would never be called
    horovod.tensorflow.join                           refuse it while a TopKEF state exists

With any other compressor each calls the original, after ranks have met those that compress.
tests/unit/test_seam.py fails when Horovod changes these functions.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import horovod._keras
import horovod.tensorflow as hvd
import tensorflow as tf

from horovod_topk.core.exchange.agreement import agree_on_nothing
from horovod_topk.core.exchange.membership import elastic
from horovod_topk.core.run.optimizers import kind_of
from horovod_topk.core.run.seams import reduction_of, refusing_join, wrap
from horovod_topk.errors import ConfigError, NotAttachedError, UnsupportedOperationError
from horovod_topk.methods.protocol import Method
from horovod_topk.ops.tensorflow import TensorFlowOps
from horovod_topk.tensorflow import scaling
from horovod_topk.tensorflow.adapting import Adapted, split, warn_of_tape
from horovod_topk.tensorflow.collective import HorovodCollective
from horovod_topk.tensorflow.compressor import Compressor
from horovod_topk.tensorflow.gradients import is_sparse, summed, to_dense
from horovod_topk.tensorflow.learning_rates import rate_of
from horovod_topk.tensorflow.memory import Memory, memory_of_tapes
from horovod_topk.tensorflow.momentum import (
    Fitted,
    check_not_twice,
    compresses,
    fitted_to,
    warn_of_late_clipping,
    warn_of_late_momentum,
)
from horovod_topk.tensorflow.planning import TapeSettings, groups_by_id, unwrap
from horovod_topk.tensorflow.refusals import (
    check_bears_zeros,
    check_none_left_out,
    refuse_local,
    refuse_unexchanged,
    refuse_xla,
)
from horovod_topk.tensorflow.state import OptimizerState, live_states
from horovod_topk.tensorflow.updates import is_keras_3, update_tf_keras

Function = Callable[..., Any]

TAPE = "DistributedGradientTape"  # the name that a tape passes, at every step


def install() -> None:
    """Wrap the three functions, once."""
    wrap(
        (hvd, "_make_allreduce_grads_fn", _wrap_make_allreduce_grads_fn),
        (horovod._keras, "create_distributed_optimizer", _wrap_create_distributed_optimizer),
        (hvd, "join", refusing_join(live_states)),
    )


class Exchange:
    """Exchanges the gradients of one optimizer, or those of a tape, instead of Horovod's function.

    Args:
        memory: the optimizer's memory; None: for a tape that knows no optimizer.
        optimizer: returns the optimizer, or None.
    """

    def __init__(
        self,
        compressor: Compressor,
        fitted: Fitted,
        settings: TapeSettings,
        memory: Memory | None,
        sparse_as_dense: bool,
        stock: Function,
        optimizer: Callable[[], Any] = lambda: None,
    ) -> None:
        self.compressor, self._fitted = compressor, fitted
        self._optimizer = optimizer
        self.scale = scaling.scale_of(compressor.grad_scaler)
        self._memory = memory
        self.state: OptimizerState | None = None  # for the variables of the last call
        self._settings = settings
        self._sparse_as_dense = sparse_as_dense
        self._stock = stock

    @property
    def config(self) -> Method:
        """The settings; without Adam's warm-up if a variable is too narrow to adapt its updates."""
        config, updates = self._fitted.config, self._fitted.updates
        is_ours = "warmup" in self.compressor.deferred
        if updates is None or updates.is_on or not (is_ours and updates.rule.normalises):
            return config
        return replace(config, warmup=None)

    def guard(self, optimizer: Any) -> None:
        """Remember the optimizer, to check in each step that no momentum is applied twice.

        Warns if momentum is corrected and the optimizer clips gradients.
        """
        self._optimizer = weakref.ref(optimizer)  # weak: the optimizer refers to this
        assert self._memory is not None  # a tape has none, and no optimizer
        self._memory.warnings += warn_of_late_clipping(optimizer, self.config.momentum)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def __call__(
        self,
        grads: Sequence[Any],
        vars: Sequence[Any],  # noqa: A002  # Horovod's name
        use_generic_names: bool = False,
    ) -> list[Any]:
        """Exchange gradients: their sum or mean over ranks, None where there is none.

        Args:
            grads: one for each variable: a tensor, tf.IndexedSlices (left to Horovod) or None.
            vars: the variables, in the same order.
            use_generic_names: passed to Horovod's function; names here do not depend on it.
        """
        refuse_xla()
        optimizer = self._optimizer()
        grads, variables = list(grads), list(vars)
        updates, memory = self._fitted.updates, self._memory
        if memory is None:
            memory = memory_of_tapes(self.config, variables, self._settings)
        if updates is not None:
            memory.warnings += updates.leave_narrow(optimizer, variables)
        rule = updates.rule if updates is not None and updates.is_on else None
        kind = None if optimizer is None else kind_of(optimizer)
        settings = replace(self._settings, update_rule=rule, optimizer=kind)
        config = self.config
        check_not_twice(optimizer, config)
        if not memory.warnings:
            memory.warnings += warn_of_late_momentum(optimizer, self._fitted)
        # Horovod would exchange sparse gradients, and no momentum would be applied to them.
        if self._sparse_as_dense or rule is not None:
            grads = [to_dense(gradient) for gradient in grads]
        check_none_left_out(grads, variables, config)
        self.state = self.compressor.state_of(variables, config, settings, memory)
        if updates is not None:
            updates.adapt(self.state, variables)
        changed = self.state.active or config.momentum or config.clip_norm is not None
        scale = self.scale() if changed else None
        if self._memory is None and self.state.active and not memory.warnings:
            memory.warnings += warn_of_tape(self.compressor)
        if not self.state.active:
            theirs = self._by_horovod(grads, variables, use_generic_names)
            local = scaling.divided(theirs, scale, variables)
            return scaling.multiplied(self.state.alone(local, variables), scale)
        sparse = [g if is_sparse(g) else None for g in grads]
        local = scaling.divided(grads, scale, variables)
        rate = rate_of(optimizer)
        if config.follow_lr and rate is None:
            raise ConfigError(
                f"follow_lr=True was given, and {kind_of(optimizer)} has no learning_rate",
                cure="Leave follow_lr= out",
            )
        known = () if updates is None else updates.moments(optimizer, variables)
        exchanged = self.state.exchange(local, variables, rate, *known)
        exchanged = scaling.multiplied(exchanged, scale)
        if all(gradient is None for gradient in sparse):
            return exchanged
        theirs = self._by_horovod(sparse, variables, use_generic_names)
        return [e if s is None else t for e, s, t in zip(exchanged, sparse, theirs, strict=True)]

    def _by_horovod(
        self, gradients: list[Any], variables: list[Any], use_generic_names: bool
    ) -> list[Any]:
        theirs = self._stock(gradients, [unwrap(v) for v in variables], use_generic_names)
        return [summed(gradient) for gradient in theirs]


class TapeExchange:
    """Exchanges the gradients of a tape, those of each adapted optimizer by themselves."""

    def __init__(
        self, compressor: Compressor, settings: TapeSettings, sparse_as_dense: bool, stock: Function
    ) -> None:
        self.compressor, self._settings = compressor, settings
        self._sparse_as_dense, self._stock = sparse_as_dense, stock
        self._states: list[OptimizerState | None] = []

    @property
    def state(self) -> OptimizerState | None:
        """The state of the last exchange."""
        if len(self._states) > 1:
            raise NotAttachedError(
                f"this tape exchanges gradients of {len(self._states)} optimizers",
                cure="Ask TopKEF.of(optimizer) for the state behind one of them",
            )
        return self._states[0] if self._states else None

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def __call__(
        self,
        grads: Sequence[Any],
        vars: Sequence[Any],  # noqa: A002  # Horovod's name
        use_generic_names: bool = False,
    ) -> list[Any]:
        """As `Exchange.__call__`."""
        result: list[Any] = [None] * len(grads)
        self._states = []
        for adapted, places in split(self.compressor.adapted, vars):
            variables = [vars[at] for at in places]
            exchange = self._exchange(adapted, variables)
            exchanged = exchange([grads[at] for at in places], variables, use_generic_names)
            for at, gradient in zip(places, exchanged, strict=True):
                result[at] = gradient
            self._states.append(exchange.state)
            if adapted is not None:
                adapted.state = exchange.state
        return result

    def _exchange(self, adapted: Adapted | None, variables: Sequence[Any]) -> Exchange:
        own, settings = self.compressor, self._settings
        last = self._sparse_as_dense, self._stock
        if adapted is None:
            return Exchange(own, Fitted(own, own.config), settings, None, *last)
        adapted.build(variables)
        exchange = Exchange(own, adapted.fitted, settings, adapted.memory, *last, adapted.optimizer)
        exchange.scale = adapted.scale(own.grad_scaler)
        return exchange


def _wrap_make_allreduce_grads_fn(original: Function) -> Function:
    signature = inspect.signature(original)

    def _make_allreduce_grads_fn(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        asked = bound.arguments
        fitted = _fitted(asked["compression"])
        if fitted is None:
            return _meeting_others(original(*args, **kwargs), asked)
        compressor = fitted.compressor
        assert isinstance(compressor, Compressor)
        groups = groups_by_id(asked["groups"])
        settings = TapeSettings(reduction_of(asked["op"], hvd), groups, asked["process_set"])
        is_tape, sparse_as_dense = asked["name"] == TAPE, asked["sparse_as_dense"]
        if not is_tape and compressor.grad_scaler is not None:
            raise ConfigError(
                "grad_scaler= was given to a distributed optimizer, which finds its loss scale by "
                "itself",
                cure="Leave it out; it is for DistributedGradientTape",
            )
        asked |= {"compression": hvd.Compression.none, "groups": None}
        stock = original(*bound.args, **bound.kwargs)
        if is_tape:
            return TapeExchange(compressor, settings, sparse_as_dense, stock)
        memory = Memory(fitted.warnings)
        return Exchange(compressor, fitted, settings, memory, sparse_as_dense, stock)

    return _make_allreduce_grads_fn


def _meeting_others(stock: Function, asked: Mapping[str, Any]) -> Function:
    """Have ranks with dense gradients meet those that compress, before the first step."""
    ranks = asked.get("process_set", hvd.global_process_set)
    if elastic() or not ranks.included() or ranks.size() == 1:
        return stock

    kind = asked["compression"]
    kind = kind if isinstance(kind, type) else type(kind)

    @functools.wraps(stock)
    def allreduce_grads(grads: Any, vars: Any = None, *args: Any, **kwargs: Any) -> Any:  # noqa: A002
        _meet_once(vars or (), f"Horovod's, for {kind.__name__}", ranks)
        return stock(grads, vars, *args, **kwargs)

    return allreduce_grads


# The first of the variables whose dense gradients ranks have met for, by its id and process set.
_MET: dict[tuple[int, int], weakref.ref[Any]] = {}


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def _meet_once(variables: Sequence[Any], compression: str, ranks: Any) -> None:
    """Meet other ranks, before dense gradients of these variables are first exchanged."""
    for first in variables[:1]:
        key, nothing = (id(first), ranks.process_set_id), lambda: None
        if _MET.get(key, nothing)() is not first:
            _MET[key] = weakref.ref(first)
            agree_on_nothing(compression, TensorFlowOps(), HorovodCollective(ranks))


def _fitted(compression: Any) -> Fitted | None:
    """The compressor and its settings; None if `compression` is not one of this package's."""
    if isinstance(compression, Fitted):
        return compression
    compressor = Compressor.asked(compression)
    if compressor is not None and compressor.config.follow_lr and not compressor.adapted:
        raise ConfigError(
            "follow_lr=True was given to a gradient tape, or to an optimizer of TensorFlow 1: "
            "neither tells its learning rate",
            cure="Write TopKEF(...).adapt(optimizer), give it to the DistributedOptimizer of a "
            "Keras, or leave it out",
        )
    if compressor is None:
        return None
    return Fitted(compressor, compressor.config)


def _wrap_create_distributed_optimizer(original: Function) -> Function:
    signature = inspect.signature(original)

    def create_distributed_optimizer(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        asked, given = bound.arguments, bound.arguments["optimizer"]
        compressor = Compressor.asked(asked["compression"])
        if compressor is None:
            return original(*args, **kwargs)
        if is_keras_3(given):
            raise UnsupportedOperationError(
                "hvd.DistributedOptimizer never calls a compressor under Keras 3, and trains "
                "without synchronising",
                cure="Use horovod_topk.tensorflow.keras.DistributedOptimizer, or tf-keras with "
                "TF_USE_LEGACY_KERAS=1",
            )
        fitted = asked["compression"] = fitted_to(given, compressor, asked["process_set"])
        asked["optimizer"] = given.inner_optimizer if scaling.is_scaler(given) else given
        optimizer = original(*bound.args, **bound.kwargs)
        if compresses(asked["process_set"]):
            cls, config = type(asked["optimizer"]), asked["optimizer"].get_config()
            kind = kind_of(asked["optimizer"])
            check_bears_zeros(lambda: cls.from_config(config), kind, fitted.config)
        refuse_unexchanged(optimizer)
        refuse_local(optimizer, fitted.config)
        if fitted.updates is not None:
            update_tf_keras(optimizer, fitted.updates)
        optimizer._allreduce_grads.guard(optimizer)
        scale = optimizer._allreduce_grads.scale = scaling.ScaleAround(optimizer)
        return scaling.around(given, optimizer, scale) if scaling.is_scaler(given) else optimizer

    return create_distributed_optimizer
