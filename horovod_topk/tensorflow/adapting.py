"""Optimizers that gradient tapes know, as `TopKEF.adapt(optimizer)` tells it.

A tape exchanges gradients and does not see what applies them. An adapted optimizer is changed in
place: it does with the exchanged gradients what a distributed optimizer does. Its settings,
residuals and warnings are kept here as long as it exists.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, cast

import horovod.tensorflow as hvd
import tensorflow as tf

from horovod_topk.core.run.base_compressor import BaseCompressor
from horovod_topk.core.run.optimizers import advise, kind_of
from horovod_topk.errors import ConfigError, UnsupportedOperationError
from horovod_topk.tensorflow.memory import Memory
from horovod_topk.tensorflow.momentum import (
    compresses,
    fitted_to,
    is_of_keras,
    warn_of_late_clipping,
)
from horovod_topk.tensorflow.planning import names_of, unwrap
from horovod_topk.tensorflow.refusals import check_bears_zeros
from horovod_topk.tensorflow.scaling import Scale, scale_of
from horovod_topk.tensorflow.state import OptimizerState
from horovod_topk.tensorflow.updates import is_keras_3, own_class, update_tf_keras
from horovod_topk.updates import tracker

Part = tuple["Adapted | None", list[int]]  # an optimizer, and positions of its variables


class Adapted:
    """An optimizer that applies what tapes exchange, and what its exchange needs.

    Args:
        optimizer: of Keras 3 or tf-keras, within a loss scale or not.
    """

    def __init__(self, optimizer: Any, compressor: BaseCompressor) -> None:
        plain = _plain(optimizer)
        self.compressor = compressor
        self.asked = compressor.config, dict(compressor.deferred)
        self.fitted = fitted_to(optimizer, compressor, hvd.global_process_set)
        config, updates = self.fitted.config, self.fitted.updates
        cls = own_class(plain, updates) if is_keras_3(plain) else type(plain)
        if compresses(hvd.global_process_set):
            check_bears_zeros(lambda: cls.from_config(plain.get_config()), kind_of(plain), config)
        clipping = warn_of_late_clipping(plain, config.momentum)
        self.memory = Memory([*self.fitted.warnings, *clipping])
        self._variables: dict[int, Any] | None = None  # those it updates, by id; None: all
        self.state: OptimizerState | None = None  # for the variables of the last exchange
        # A weak reference, because the optimizer keeps this object alive.
        self.optimizer, self._given = weakref.ref(plain), weakref.ref(optimizer)
        if is_keras_3(plain):
            object.__setattr__(plain, "__class__", cls)
        elif updates is not None:
            update_tf_keras(plain, updates)

    def take(self, variables: Iterable[Any] | None) -> None:
        """Note the variables that the optimizer updates; None stands for all."""
        known = None if variables is None else {id(unwrap(each)): each for each in variables}
        self._variables = known

    def has(self, variable: Any) -> bool:
        """Whether the optimizer updates a variable."""
        return self._variables is None or id(unwrap(variable)) in self._variables

    def scale(self, scaler: Any) -> Scale:
        """The optimizer's own loss scale, or that of the setting `grad_scaler`."""
        given = self._given()
        return scale_of(given if hasattr(given, "inner_optimizer") else scaler)

    def build(self, variables: Iterable[Any]) -> None:
        """Make Adam's mean squares, which a graph that exchanges gradients reads."""
        updates, plain = self.fitted.updates, cast("Any", self.optimizer())
        if updates is not None and updates.rule == tracker.ADAM and not tf.executing_eagerly():
            with tf.init_scope():
                make = plain.build if hasattr(plain, "build") else plain._create_all_weights
                make(list(variables if self._variables is None else self._variables.values()))


_OF: weakref.WeakKeyDictionary[Any, Adapted] = weakref.WeakKeyDictionary()


def adapted_to(
    optimizer: Any, compressor: BaseCompressor, variables: Iterable[Any] | None
) -> Adapted:
    """Have an optimizer do with exchanged gradients what a distributed one does; it changes once.

    variables: those that it updates; None: all.
    """
    _check(optimizer)
    plain = _plain(optimizer)
    if plain not in _OF:
        _OF[plain] = Adapted(optimizer, compressor)
    adapted = _OF[plain]
    if adapted.asked != (compressor.config, dict(compressor.deferred)):
        raise ConfigError(
            f"{kind_of(plain)} was adapted to {adapted.compressor!r}, and now to {compressor!r}",
            cure="Adapt it once, before the first step, or make a new optimizer",
        )
    adapted.take(variables)
    return adapted


def find_adapted(optimizer: Any) -> Adapted | None:
    """Return the record of an adapted optimizer, or None if it was not adapted."""
    return _OF.get(_plain(optimizer)) if is_of_keras(optimizer) else None


def exchanges(optimizer: Any) -> bool:
    """Whether an optimizer exchanges gradients in its steps: it is distributed, or adapted."""
    return _is_distributed(optimizer) or find_adapted(optimizer) is not None


def split(adapted: Sequence[Adapted], variables: Sequence[Any]) -> list[Part]:
    """Positions of the variables of each adapted optimizer; of None, where there is none."""
    if not adapted:
        return [(None, list(range(len(variables))))]
    found: dict[Adapted, list[int]] = {each: [] for each in adapted}
    for at, variable in enumerate(variables):
        own = [each for each in adapted if each.has(variable)]
        if len(own) != 1:
            raise ConfigError(
                f"{len(own)} of {len(adapted)} adapted optimizers update this variable",
                tensor=names_of([variable])[0],
                cure="Pass each optimizer's variables: TopKEF(...).adapt(optimizer, variables)",
            )
        found[own[0]].append(at)
    return [(each, places) for each, places in found.items() if places]


def warn_of_tape(compressor: BaseCompressor) -> tuple[str, ...]:
    """Warn that a tape's gradients are applied by an optimizer that it does not know."""
    is_left = "momentum" in compressor.deferred and not compressor.config.in_rounds
    why = (
        f"a tape does not know it. Write compression = {compressor!r}.adapt(optimizer) before the "
        "first step"
    )
    config = compressor.config
    return advise("a tape's optimizer", config, why if is_left else "", normalises=False)


def _plain(optimizer: Any) -> Any:
    """The optimizer within a loss scale, if there is one."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def _is_distributed(optimizer: Any) -> bool:
    return any(hasattr(each, "_allreduce_grads") for each in (optimizer, _plain(optimizer)))


def _check(optimizer: Any) -> None:
    plain = _plain(optimizer)
    if not (is_of_keras(optimizer) and hasattr(optimizer, "apply_gradients")):
        raise UnsupportedOperationError(
            f"adapt({optimizer!r:.60}) was called: it is no optimizer of Keras 3 or tf-keras",
            cure="Pass the optimizer that applies the gradients; for updates of your own see "
            "docs/tensorflow.md",
        )
    if not hvd.is_initialized():
        raise ConfigError("adapt() was called before hvd.init()", cure="Call hvd.init() first")
    if _is_distributed(optimizer):
        raise UnsupportedOperationError(
            f"{kind_of(plain)} exchanges gradients by itself, and so does a tape",
            cure="Adapt the optimizer that was not distributed, or use no DistributedGradientTape",
        )
    if hasattr(plain, "_inner_optimizers"):
        raise UnsupportedOperationError(
            f"{kind_of(plain)} hands gradients on to other optimizers",
            cure="Adapt each of its optimizers: TopKEF(...).adapt(optimizer, its variables)",
        )
    if steps := getattr(plain, "gradient_accumulation_steps", None):
        raise UnsupportedOperationError(
            f"{kind_of(plain)} has gradient_accumulation_steps={steps}, and a tape would exchange "
            "in each of them",
            cure="Use horovod_topk.tensorflow.keras.DistributedOptimizer, which exchanges once, or "
            "add gradients up before you exchange them",
        )
