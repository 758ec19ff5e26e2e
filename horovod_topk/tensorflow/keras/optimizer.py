"""A Keras 3 optimizer that exchanges gradients before it uses them.

The wrapped optimizer gets a class of its own with the name and module of its base, so that a saved
model can be loaded without Horovod. Gradients are exchanged where the base class first reads them:
after a fixed loss scale is taken out, before clipping and weight decay, and, with
`gradient_accumulation_steps`, only in the steps that apply them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras

from horovod_topk.errors import UnsupportedOperationError
from horovod_topk.tensorflow.planning import unwrap
from horovod_topk.tensorflow.seam import Exchange

log = logging.getLogger("horovod_topk")


def DistributedOptimizer(  # noqa: N802  # Horovod's name
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = hvd.Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = hvd.Average,
    backward_passes_per_step: int = 1,
    groups: Any = None,
    process_set: Any = hvd.global_process_set,
) -> Any:
    """A copy of a Keras 3 optimizer, with its state, that exchanges gradients over all ranks.

    Under the policy "mixed_float16" an optimizer without a loss scale is given one, inside: ranks
    then decide together whether to skip a step.

    Args:
        optimizer: a `keras.optimizers.Optimizer`, or a `LossScaleOptimizer` around one.
        name: of the exchange, "Distributed" and the optimizer's class by default.
        device_dense: as Horovod has it.
        device_sparse: as Horovod has it.
        compression: `TopKEF`, one of `hvd.Compression`, or another Horovod compressor.
        sparse_as_dense: exchange tf.IndexedSlices as dense tensors.
        gradient_predivide_factor: splits the averaging before and after the sum (op=Average).
        op: hvd.Average or hvd.Sum.
        backward_passes_per_step: 1; Keras itself accumulates gradients.
        groups: a number of groups, or lists of variables.
        process_set: the ranks that exchange.

    Raises:
        UnsupportedOperationError: see the message.
    """
    _check(optimizer, op, backward_passes_per_step)
    optimizer = _with_loss_scale(optimizer)
    base = type(optimizer)
    exchange = hvd._make_allreduce_grads_fn(
        name or f"Distributed{base.__name__}",
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        groups,
        process_set=process_set,
    )
    scaled = issubclass(base, keras.optimizers.LossScaleOptimizer)
    members = {
        "__module__": base.__module__,
        "__doc__": base.__doc__,
        "_exchanger": _Exchanger(exchange),
    }
    cls: Any = type(base.__name__, (_ExchangesScaled if scaled else _Exchanges, base), members)
    return _with_state_of(optimizer, cls.from_config(optimizer.get_config()))


def load_model(
    filepath: str | Path,
    custom_objects: dict[str, Any] | None = None,
    safe_mode: bool = True,
    **distributed: Any,
) -> Any:
    """Load a compiled model and wrap its optimizer, state and all, in `DistributedOptimizer`.

    Args:
        filepath: what `model.save` wrote; on every rank, or read from one place.
        custom_objects: as `keras.saving.load_model` has it.
        safe_mode: as `keras.saving.load_model` has it.
        distributed: arguments of `DistributedOptimizer`.
    """
    model = keras.saving.load_model(filepath, custom_objects=custom_objects, safe_mode=safe_mode)
    model.jit_compile = False  # XLA has no kernel for Horovod's operations
    model.optimizer = DistributedOptimizer(model.optimizer, **distributed)
    return model


class _Exchanger:
    """Horovod's function with the variables it needs, outside of what Keras tracks."""

    def __init__(self, function: Callable[..., list[Any]]) -> None:
        self.function = function
        self.variables: list[Any] = []  # of the step that is being built

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Exchanged gradients; ours takes names from Keras's variables, Horovod wants tf's."""
        if not isinstance(self.function, Exchange):
            variables = [unwrap(v) for v in variables]
        return list(self.function(list(gradients), list(variables)))


class _Exchanges:
    """Mixed in before a Keras optimizer; overrides what it calls on its way to an update."""

    _exchanger: _Exchanger

    @property
    def _allreduce_grads(self) -> Callable[..., list[Any]]:
        return self._exchanger.function

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> None:
        self._exchanger.variables = list(trainable_variables)
        super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Any) -> Any:
        exchanged = self._exchanger(grads, self._exchanger.variables)
        return super()._clip_gradients(exchanged)  # type: ignore[misc]

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse what only the constructor of LossScaleOptimizer does to a finished optimizer."""
        if name == "loss_scale_factor" and value is None and "built" in self.__dict__:
            raise UnsupportedOperationError(
                "a LossScaleOptimizer was put around a distributed optimizer: one rank that "
                "overflows would skip the exchange, and all others wait for it",
                cure="Pass DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer)), "
                'or set the policy "mixed_float16" before DistributedOptimizer is called',
            )
        super().__setattr__(name, value)


class _ExchangesScaled:
    """Mixed in before LossScaleOptimizer: what it looks at is the same on every rank.

    Gradients are exchanged without the scale, which may differ from step to step, so that residuals
    are in the gradients' own unit.
    """

    _exchanger: _Exchanger

    @property
    def _allreduce_grads(self) -> Callable[..., list[Any]]:
        return self._exchanger.function

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """As the base class, on exchanged gradients."""
        this: Any = self
        variables = list(trainable_variables or this._trainable_variables)
        if not this.built:
            with keras.name_scope(this.name, caller=this):
                this.build(variables)
            this.built = True
        scale = this.dynamic_scale
        unscaled = [_apply(keras.ops.divide, gradient, scale) for gradient in grads]
        exchanged = self._exchanger(unscaled, variables)
        scaled = [_apply(keras.ops.multiply, gradient, scale) for gradient in exchanged]
        super().apply(scaled, trainable_variables)  # type: ignore[misc]


def _apply(operation: Callable[..., Any], gradient: Any, scale: Any) -> Any:
    return None if gradient is None else operation(gradient, scale)


def _check(optimizer: Any, op: Any, backward_passes_per_step: int) -> None:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise UnsupportedOperationError(
            f"{type(optimizer).__module__}.{type(optimizer).__name__} is no optimizer of Keras 3",
            cure="Pass a keras.optimizers.Optimizer; for tf-keras use hvd.DistributedOptimizer",
        )
    if isinstance(optimizer, _Exchanges | _ExchangesScaled):
        raise UnsupportedOperationError(
            f"{type(optimizer).__name__} exchanges gradients already",
            cure="Call DistributedOptimizer once",
        )
    if op not in (hvd.Average, hvd.Sum):
        raise UnsupportedOperationError(
            f"op={op} has no meaning for a Keras optimizer", cure="Pass hvd.Average or hvd.Sum"
        )
    if backward_passes_per_step != 1:
        raise UnsupportedOperationError(
            f"backward_passes_per_step={backward_passes_per_step}, Keras 3 accumulates by itself",
            cure="Give the optimizer gradient_accumulation_steps, and leave this at 1",
        )
    inner = getattr(optimizer, "inner_optimizer", None)
    if getattr(inner, "gradient_accumulation_steps", None):
        raise UnsupportedOperationError(
            "gradient_accumulation_steps inside a LossScaleOptimizer would exchange every "
            "micro-step",
            cure="Leave out one of the two, or use bfloat16, which needs no loss scale",
        )


def _with_loss_scale(optimizer: Any) -> Any:
    """The optimizer, or a loss scale around it where Keras would put one."""
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if scales or keras.config.dtype_policy().name != "mixed_float16":
        return optimizer
    if optimizer.gradient_accumulation_steps:
        _check(keras.optimizers.LossScaleOptimizer(optimizer), hvd.Average, 1)
    log.info('policy "mixed_float16": %s gets a dynamic loss scale', type(optimizer).__name__)
    return keras.optimizers.LossScaleOptimizer(optimizer)


def _with_state_of(optimizer: Any, copy: Any) -> Any:
    """Give a copy the slots and counters of an optimizer that has trained already."""
    for suffix in ("", "_pattern", "_cache"):  # exclude_from_weight_decay() is in no configuration
        name = f"_exclude_from_weight_decay{suffix}"
        if hasattr(optimizer, name):
            setattr(copy, name, getattr(optimizer, name))
    if optimizer.built:
        copy.build(optimizer._trainable_variables)
    if len(copy.variables) == len(optimizer.variables):
        for mine, theirs in zip(copy.variables, optimizer.variables, strict=True):
            mine.assign(theirs)
    return copy
