"""A Keras 3 optimizer that exchanges gradients before it applies them.

The wrapped optimizer gets its own class with the name and module of its base, so that a saved model
can be loaded without Horovod. Gradients are exchanged where the base class first reads them: after
it divides by a fixed loss scale, before clipping and weight decay, and, with
`gradient_accumulation_steps`, only in the steps that apply them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from horovod_topk.core.exchange.membership import why_inactive
from horovod_topk.core.run.optimizers import kind_of
from horovod_topk.errors import UnsupportedOperationError
from horovod_topk.tensorflow.adapting import find_adapted
from horovod_topk.tensorflow.compressor import Compressor
from horovod_topk.tensorflow.gradients import summed
from horovod_topk.tensorflow.keras.copying import blank, copied, with_loss_scale
from horovod_topk.tensorflow.momentum import compresses, fitted_to
from horovod_topk.tensorflow.planning import unwrap
from horovod_topk.tensorflow.refusals import check_bears_zeros, refuse_xla
from horovod_topk.tensorflow.seam import Exchange
from horovod_topk.tensorflow.updates import own_class


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
    """Return a copy of a Keras 3 optimizer that exchanges gradients between ranks before each step.

    The copy has the optimizer's state. Gradients are exchanged before Keras clips them or adds
    weight decay. Under the policy "mixed_float16" an optimizer without a loss scale gets one, so
    that all ranks skip the same steps.

    Args:
        optimizer: a `keras.optimizers.Optimizer`, or a `LossScaleOptimizer` around one.
        name: name of the exchange. None: "Distributed" and the name of the optimizer's class.
        device_dense: as in `hvd.DistributedOptimizer`.
        device_sparse: as in `hvd.DistributedOptimizer`.
        compression: `TopKEF` (the class or an instance), one of `hvd.Compression`, or another
            Horovod compressor.
        sparse_as_dense: exchange tf.IndexedSlices as dense tensors.
        gradient_predivide_factor: for op=hvd.Average, divide gradients by this before the sum,
            and by (number of ranks / this) after it.
        op: hvd.Average or hvd.Sum.
        backward_passes_per_step: 1. To accumulate gradients, use Keras' own
            `gradient_accumulation_steps`.
        groups: gradients to exchange together: a number of groups, or, with TopKEF, lists of
            variables. None: with TopKEF, buckets of 25 MiB.
        process_set: the ranks that exchange gradients.

    Raises:
        UnsupportedOperationError: this optimizer or one of the arguments cannot be used.
        ConfigError: the optimizer does not fit the settings of TopKEF.
    """
    _check(optimizer, op, gradient_predivide_factor, backward_passes_per_step)
    compressor = Compressor.asked(compression)
    fitted = None if compressor is None else fitted_to(optimizer, compressor, process_set)
    if fitted is not None:
        compression = fitted
    elif isinstance(groups, list):
        raise UnsupportedOperationError(
            "groups= as lists: Horovod tells variables apart by names, which Keras 3 repeats",
            cure="Pass groups= as a number, or compression=TopKEF",
        )
    optimizer = with_loss_scale(optimizer)
    _check_accumulation(optimizer)
    name = name or f"Distributed{type(optimizer).__name__}"
    exchange = hvd._make_allreduce_grads_fn(
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        groups,
        process_set=process_set,
    )
    plain = getattr(optimizer, "inner_optimizer", optimizer)
    own = type(plain) if fitted is None else own_class(plain, fitted.updates)
    if fitted is not None and compresses(process_set):
        check_bears_zeros(lambda: blank(plain, own), kind_of(plain), fitted.config)
    cls, inner = _classes(optimizer, _Exchanger(exchange, name, process_set), own)
    distributed = copied(optimizer, cls, inner)
    if isinstance(exchange, Exchange):
        exchange.guard(distributed)
    return distributed


def _classes(optimizer: Any, exchanger: _Exchanger, own: type) -> tuple[Any, Any]:
    """The class of the copy, and that of the optimizer inside its loss scale if it changes.

    own: the class of the optimizer, or of that inside its loss scale, with its updates.
    """
    base, inner = type(optimizer), None
    bases: tuple[type, ...] = (_ExchangesScaled, base)
    if issubclass(base, keras.optimizers.LossScaleOptimizer):
        plain = type(optimizer.inner_optimizer)
        names = {"__module__": plain.__module__, "__doc__": plain.__doc__}
        of_inner = (own,) if issubclass(own, _InOneReplica) else (_InOneReplica, own)
        inner = type(plain.__name__, of_inner, names)
    else:
        bases = (_Exchanges, own)
    members = {"__module__": base.__module__, "__doc__": base.__doc__, "_exchanger": exchanger}
    return type(base.__name__, bases, members), inner


def load_model(
    filepath: str | Path,
    custom_objects: dict[str, Any] | None = None,
    safe_mode: bool = True,
    **distributed: Any,
) -> Any:
    """Load a compiled model, and wrap its optimizer together with the optimizer's state.

    Args:
        filepath: a file that `model.save` wrote, readable on every rank.
        custom_objects: as in `keras.saving.load_model`.
        safe_mode: as in `keras.saving.load_model`.
        distributed: arguments of `DistributedOptimizer`, such as `compression`.

    Returns:
        The model, compiled with the distributed optimizer.

    Raises:
        UnsupportedOperationError, ConfigError: as `DistributedOptimizer`.
    """
    model = keras.saving.load_model(filepath, custom_objects=custom_objects, safe_mode=safe_mode)
    model.jit_compile = False  # XLA has no kernel for Horovod's operations
    model.optimizer = DistributedOptimizer(model.optimizer, **distributed)
    return model


class _Exchanger:
    """Holds Horovod's function and the variables it needs, hidden from Keras' tracking."""

    def __init__(self, function: Callable[..., list[Any]], name: str, process_set: Any) -> None:
        self.function, self._name, self._process_set = function, name, process_set
        self.variables: list[Any] = []  # those of the step that is being built
        self.reached = False  # whether this step applied or accumulated gradients

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Exchange gradients; Horovod's function gets tf.Variables, `Exchange` Keras variables."""
        if isinstance(self.function, Exchange):
            return list(self.function(list(gradients), list(variables)))
        refuse_xla()
        exchanged = self.function(list(gradients), [unwrap(v) for v in variables])
        return [summed(gradient) for gradient in exchanged]

    def among_all(
        self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]
    ) -> list[Any]:
        """Exchange gradients of some of a built optimizer's variables; the others keep their place.

        So a variable that is frozen for a while leaves neither its residual nor the count of steps.
        """
        everything = list(optimizer._trainable_variables)
        places = [optimizer._get_variable_index(v) for v in variables]
        spread: list[Any] = [None] * len(everything)
        for place, gradient in zip(places, gradients, strict=True):
            spread[place] = gradient
        exchanged = self(spread, everything)
        return [exchanged[place] for place in places]

    def largest(self, values: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the largest values of all ranks, as new values of overwritten variables.

        The largest magnitudes that float8 is scaled by have to be those of the global batch.
        """
        if not values or why_inactive(self._process_set) is not None:
            return list(values)
        refuse_xla()
        flat = tf.concat([tf.reshape(tf.cast(each, tf.float32), [-1]) for each in values], 0)
        flat = tf.where(tf.math.is_nan(flat), flat.dtype.max, flat)  # a maximum may miss a NaN
        name = f"topkef.overwritten.{self._name}.{variables[0].path}"
        options = {"name": name, "process_set": self._process_set}
        found = hvd.allreduce(flat, op=hvd.Max, **options)
        parts = tf.split(found, [int(v.value.shape.num_elements()) for v in variables])
        return [
            tf.cast(tf.reshape(part, tf.shape(each)), each.dtype)
            for part, each in zip(parts, values, strict=True)
        ]


class _InOneReplica:
    """Mixin for a Keras optimizer that does not add gradients up over replicas if there is one.

    Keras does so by a function with a gradient of its own, and TensorFlow keeps each of these, with
    the graph of the training step, until the process ends.
    """

    def _all_reduce_sum_gradients(self, grads_and_vars: Any) -> Any:
        if tf.distribute.has_strategy():
            return super()._all_reduce_sum_gradients(grads_and_vars)  # type: ignore[misc]
        return grads_and_vars


class _Exchanging:
    """What distributed optimizers of Keras 3 have in common."""

    _exchanger: _Exchanger

    @property
    def _allreduce_grads(self) -> Callable[..., list[Any]]:
        return self._exchanger.function


class _Exchanges(_Exchanging, _InOneReplica):
    """Mixin for a Keras optimizer that exchanges gradients where it clips them."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """As the base class; raises if the base class did not reach the exchange."""
        self._exchanger.reached = False
        super().apply(grads, trainable_variables)  # type: ignore[misc]
        if not self._exchanger.reached and any(gradient is not None for gradient in grads):
            raise UnsupportedOperationError(
                f"{type(self).__name__} updates variables in a way of its own, on gradients that "
                "have not been exchanged",
                cure="Wrap an optimizer with the apply() of keras.optimizers.Optimizer, or use "
                "hvd.DistributedGradientTape",
            )

    def _overwrite_variables_directly_with_gradients(
        self,
        grads: Any,
        vars: Any,  # noqa: A002  # Keras' name
    ) -> Any:
        this: Any = self
        base: Any = super()
        pairs = zip(grads, vars, strict=True)
        new = _largest(self._exchanger, pairs, this._overwrite_variable_with_gradient)
        return base._overwrite_variables_directly_with_gradients(new, vars)

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> None:
        self._exchanger.reached = True
        self._exchanger.variables = list(trainable_variables)
        super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Any) -> Any:
        """Exchange, then clip."""
        exchanged = self._exchanger.among_all(self, grads, self._exchanger.variables)
        return super()._clip_gradients(exchanged)  # type: ignore[misc]

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse to put a finished optimizer into a LossScaleOptimizer."""
        if name == "loss_scale_factor" and value is None and "built" in self.__dict__:
            raise UnsupportedOperationError(
                "a LossScaleOptimizer was put around a distributed optimizer: one rank that "
                "overflows would skip the exchange, and all others wait for it",
                cure="Pass DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer)), "
                'or set the policy "mixed_float16" before DistributedOptimizer is called',
            )
        super().__setattr__(name, value)


class _ExchangesScaled(_Exchanging):
    """Mixin for LossScaleOptimizer that exchanges first, so that all ranks skip the same steps.

    Gradients are divided by the scale before the exchange, as the scale may change from step to
    step, and residuals must not depend on it.
    """

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """As the base class, on exchanged gradients."""
        this: Any = self
        variables = list(trainable_variables or this._trainable_variables)
        if not this.built:
            with keras.name_scope(this.name, caller=this):
                this.build(variables)
            this.built = True
        this._check_variables_are_known(variables)
        scale = this.dynamic_scale
        overwrites = this._overwrite_variable_with_gradient
        grads = _largest(self._exchanger, zip(grads, variables, strict=True), overwrites)
        kept = [g if overwrites(v) else None for g, v in zip(grads, variables, strict=True)]
        unscaled = [
            None if g is None or k is not None else keras.ops.divide(g, scale)
            for g, k in zip(grads, kept, strict=True)
        ]
        exchanged = self._exchanger.among_all(this, unscaled, variables)
        scaled = [
            k if g is None else keras.ops.multiply(g, scale)
            for g, k in zip(exchanged, kept, strict=True)
        ]
        super().apply(scaled, trainable_variables)  # type: ignore[misc]


def _largest(
    exchanger: _Exchanger, pairs: Iterable[tuple[Any, Any]], overwrites: Callable[[Any], bool]
) -> list[Any]:
    """Replace the gradients that overwrite their variables by the largest of all ranks."""
    gradients, variables = map(list, zip(*pairs, strict=True))
    at = [i for i, v in enumerate(variables) if gradients[i] is not None and overwrites(v)]
    found = exchanger.largest([gradients[i] for i in at], [variables[i] for i in at])
    for i, gradient in zip(at, found, strict=True):
        gradients[i] = gradient
    return gradients


def _check(optimizer: Any, op: Any, predivide: float, backward_passes_per_step: int) -> None:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise UnsupportedOperationError(
            f"{type(optimizer).__module__}.{type(optimizer).__name__} is no optimizer of Keras 3",
            cure="Pass a keras.optimizers.Optimizer; for tf-keras use hvd.DistributedOptimizer",
        )
    if isinstance(optimizer, _Exchanging):
        raise UnsupportedOperationError(
            f"{type(optimizer).__name__} exchanges gradients already",
            cure="Call DistributedOptimizer once",
        )
    if find_adapted(optimizer):
        raise UnsupportedOperationError(
            f"{kind_of(optimizer)} was adapted for tapes, which exchange gradients already",
            cure="Leave out either TopKEF(...).adapt(optimizer) or the DistributedOptimizer",
        )
    if op not in (hvd.Average, hvd.Sum):
        raise UnsupportedOperationError(
            f"op={op} has no meaning for a Keras optimizer", cure="Pass hvd.Average or hvd.Sum"
        )
    if predivide != 1.0 and op != hvd.Average:
        raise UnsupportedOperationError(
            f"gradient_predivide_factor={predivide} splits an average, and op is hvd.Sum",
            cure="Pass op=hvd.Average, or leave gradient_predivide_factor at 1.0",
        )
    if backward_passes_per_step != 1:
        raise UnsupportedOperationError(
            f"backward_passes_per_step={backward_passes_per_step}, Keras 3 accumulates by itself",
            cure="Give the optimizer gradient_accumulation_steps, and leave this at 1",
        )
    if isinstance(optimizer, getattr(keras.optimizers, "MultiOptimizer", ())):
        raise UnsupportedOperationError(
            "MultiOptimizer hands gradients on to others, which would apply them unexchanged",
            cure="Distribute each of its optimizers by itself, or adapt each of them for an "
            "hvd.DistributedGradientTape: TopKEF(...).adapt(optimizer, its variables)",
        )


def _check_accumulation(optimizer: Any) -> None:
    inner = getattr(optimizer, "inner_optimizer", None)
    if getattr(inner, "gradient_accumulation_steps", None):
        raise UnsupportedOperationError(
            "gradient_accumulation_steps inside a LossScaleOptimizer would exchange every "
            "micro-step",
            cure="Leave out one of the two, or use bfloat16, which needs no loss scale",
        )
