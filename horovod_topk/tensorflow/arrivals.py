"""Keras' updates on compressed gradients, by `horovod_topk.core.arrivals`.

Before an update the optimizer's momentum is prepared, so that the optimizer's own code then
computes the one that is wanted. Adam and AdamW:

    m_t = s_t (b m_(t-1) / s_(t-1) + (1 - b) c G),  b = beta1 phi^(1/2),  s_t = 1 - beta1^t
    |m_t| <= far s_t sqrt(v_t / (1 - beta2^t)),     far = max(1, rms(p) / 5 / lr)

m_t is what Adam divides by s_t, so that updates have no bias to correct. The first update is Adam's
own; in the first ones far is 1. SGD, whose m_t has the learning rate lr in it, with mu its
momentum, updates with M in place of m_t; after the update m_t is dense SGD's again:

    M   = (1 - b) (mu m_(t-1) - lr c G) / (1 - mu),  b = mu phi^(1/4)
    m_t = b (1 - mu) M / ((1 - b) mu)
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from horovod_topk.core.arrivals import (
    FARTHEST,
    FREE,
    RATE,
    SLOWEST,
    Arrived,
    ArrivedToSgd,
    arrived_often,
    is_young,
)
from horovod_topk.core.optimizers import warn_of_unknown
from horovod_topk.tensorflow.planning import unwrap
from horovod_topk.tensorflow.state import OptimizerState


@dataclass
class ByArrivals:
    """Has the updates of one optimizer depend on how often elements arrive."""

    is_on: bool = field(default=True, compare=False)  # False: variables are too narrow for it
    _states: weakref.WeakValueDictionary[int, OptimizerState] = field(
        default_factory=weakref.WeakValueDictionary, compare=False, repr=False
    )  # state of the exchange of each variable, by its id

    def leave_narrow(self, optimizer: Any, variables: Iterable[Any]) -> list[str]:
        """Leave updates as they are if a variable is narrower than float32.

        Returns:
            The warnings that were given: one or none.
        """
        for inner in map(unwrap, variables) if self.is_on else ():
            if inner.dtype not in (tf.float32, tf.float64):
                self.is_on, kind = False, type(optimizer).__name__
                self._states.clear()
                why = f"variable {inner.name!r} is {inner.dtype.name}"
                return [warn_of_unknown(kind, why)]
        return []

    def follow(self, state: OptimizerState, variables: Iterable[Any]) -> None:
        """Note the state of these variables' exchange."""
        for variable in variables if self.is_on else ():
            self._states[id(unwrap(variable))] = state

    def squares(self, optimizer: Any, variables: Iterable[Any]) -> list[Any]:
        """Return Adam's mean square of each variable; None where it does not exist yet."""
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        if not self.is_on or is_sgd(optimizer):
            return []
        slots = [_square_of(optimizer, variable) for variable in variables]
        return [None if slot is None else tf.convert_to_tensor(slot) for slot in slots]

    def update(
        self,
        optimizer: Any,
        gradient: Any,
        variable: Any,
        update: Callable[[], Any],
        rate: Callable[[], Any],
    ) -> Any:
        """Call the optimizer's own update of a variable with another momentum.

        Args:
            optimizer: of Keras 3 or tf-keras, legacy or not.
            gradient: the gradient that the update applies.
            variable: the variable, of the optimizer's library.
            update: the update; its result is returned.
            rate: returns its learning rate.
        """
        state = self._states.get(id(unwrap(variable)))
        known = None if state is None else state.arrivals_of(variable)
        if known is None:
            return update()
        if isinstance(known, ArrivedToSgd):
            return _update_sgd(optimizer, gradient, variable, known, update, rate)
        with tf.control_dependencies([_prepare_adam(optimizer, gradient, variable, known, rate)]):
            return update()

    def follows(self, variable: Any) -> bool:
        """Whether the updates of a variable depend on arrivals from now on."""
        return id(unwrap(variable)) in self._states


def update_by_arrivals(optimizer: Any, by: ByArrivals) -> None:
    """Have each update of a tf-keras optimizer depend on arrivals.

    What XLA compiles calls the same `update_step`.
    """
    if is_legacy(optimizer):
        own = optimizer._resource_apply_dense

        def dense(gradient: Any, variable: Any, *rest: Any) -> Any:
            update = functools.partial(own, gradient, variable, *rest)
            rate = functools.partial(optimizer._decayed_lr, variable.dtype.base_dtype)
            return by.update(optimizer, gradient, variable, update, rate)

        optimizer._resource_apply_dense = dense
        return
    own_step, compiled = optimizer.update_step, optimizer._update_step_xla

    def step(gradient: Any, variable: Any) -> Any:
        update = functools.partial(own_step, gradient, variable)
        return by.update(optimizer, gradient, variable, update, lambda: optimizer.learning_rate)

    def keyed(gradient: Any, variable: Any, key: int) -> Any:
        """XLA compiles an update once for each key: one that depends on arrivals has another."""
        return compiled(gradient, variable, -key if by.follows(variable) else key)

    optimizer.update_step, optimizer._update_step_xla = step, keyed


def is_legacy(optimizer: Any) -> bool:
    """Whether an optimizer is one of `tf_keras.optimizers.legacy`."""
    return hasattr(optimizer, "_hyper")


def slot_of(optimizer: Any, variable: Any, kind: str = "_momentums") -> Any:
    """The tf.Variable with an optimizer's momentum of one variable. Not for legacy optimizers.

    None: the variable is overwritten by its gradient, as the scales of float8 are in Keras 3.

    kind: "_velocities" for Adam's mean square.
    """
    slots: Any = getattr(optimizer, kind, None)
    if slots is None and kind == "_momentums":
        slots = optimizer.momentums  # of tf-keras' SGD
    if hasattr(optimizer, "_index_dict"):  # tf-keras
        return slots[optimizer._index_dict[optimizer._var_key(variable)]]
    slot = slots[optimizer._get_variable_index(variable)]
    return None if slot is None else unwrap(slot)


def is_sgd(optimizer: Any) -> bool:
    """Whether an optimizer is SGD. Otherwise it is Adam or AdamW."""
    return not (hasattr(optimizer, "beta_1") or "beta_1" in getattr(optimizer, "_hyper", ()))


def _update_sgd(
    optimizer: Any,
    gradient: Any,
    variable: Any,
    known: ArrivedToSgd[Any],
    update: Callable[[], Any],
    rate: Callable[[], Any],
) -> Any:
    """Update a variable with the momentum that SGD is to have; for arguments see `ByArrivals`."""
    if is_legacy(optimizer):
        slot = optimizer.get_slot(variable, "momentum")
        momentum = _wide(optimizer._get_hyper("momentum"))
    else:
        slot, momentum = slot_of(optimizer, variable), _wide(optimizer.momentum)
    own = tf.convert_to_tensor(slot), tf.cast(gradient, slot.dtype)
    arrived = tf.convert_to_tensor(known.arrivals), _wide(known.begins), _wide(known.loss)
    function = _traced(_moved_by_sgd, tuple(slot.shape), slot.dtype)
    moved, back, phi = function(*own, *arrived, momentum, _wide(rate()))
    begun = known.arrivals.assign(phi, read_value=False)  # most often the same tensor
    with tf.control_dependencies([slot.assign(moved), begun]):
        result = update()
    with tf.control_dependencies([] if result is None else [result]):
        restored = slot.assign(slot * back)
    return None if result is None else tf.group(result, restored)


@functools.cache
def _traced(function: Callable[..., Any], shape: tuple[int, ...], dtype: Any) -> Any:
    """Return a function whose graph all variables of a shape and dtype share.

    Keras traces a training step twice, and building the graph takes longer than a step.
    """
    return tf.function(function, autograph=False)


def _moved_by_sgd(
    slot: Any, gradient: Any, arrivals: Any, begins: Any, loss: Any, momentum: Any, rate: Any
) -> tuple[Any, Any, Any]:
    """Compute the momentum that SGD's update begins with, the factor that restores it, and phi.

    Args:
        slot: the momentum, in the optimizer's units.
        gradient: the gradient that the update applies.
        arrivals: phi of each element, flat.
        begins: 1 if arrivals begin with this step, else 0: [] float64.
        loss: what an element that always arrives loses: [] float64.
        momentum, rate: the optimizer's: [] float64.
    """
    mu, left, share, step, loss = (
        tf.cast(each, slot.dtype)
        for each in (
            *(momentum, 1.0 - momentum, tf.math.divide_no_nan(1.0 - momentum, momentum)),
            *(rate, loss),
        )
    )
    begun = tf.cond(begins > 0, lambda: _begun(arrivals, slot), lambda: arrivals)
    phi = tf.reshape(tf.cast(begun, slot.dtype), slot.shape)
    b = mu * tf.sqrt(tf.sqrt(phi))
    moved = (1.0 - b) / left * (mu * slot - step * (1.0 - loss * phi) * gradient)
    moved = tf.math.divide_no_nan(moved + step * gradient, mu)
    return moved, b * share / (1.0 - b), begun


def _begun(phi: Any, slot: Any) -> Any:
    """Return phi, which begins at 1 where the momentum comes from dense updates."""
    is_new = (tf.reduce_max(phi) <= 1.5 * RATE) & tf.reduce_any(tf.not_equal(slot, 0))
    return tf.where(is_new, phi + (1.0 - RATE), phi)


def _prepare_adam(
    optimizer: Any,
    gradient: Any,
    variable: Any,
    known: Arrived[Any],
    rate: Callable[[], Any],
) -> Any:
    """Prepare the first moment of Adam's update; for arguments see `ByArrivals.update`."""
    legacy = is_legacy(optimizer)
    moment = optimizer.get_slot(variable, "m") if legacy else slot_of(optimizer, variable)
    betas = (
        [optimizer._get_hyper(name) for name in ("beta_1", "beta_2")]
        if legacy
        else [optimizer.beta_1, optimizer.beta_2]
    )
    square = tf.convert_to_tensor(_square_of(optimizer, variable))
    steps = tf.cast(tf.convert_to_tensor(optimizer.iterations), tf.float64)
    own = tf.convert_to_tensor(moment), square, tf.cast(gradient, moment.dtype)
    arrived = (tf.convert_to_tensor(each) for each in (known.arrivals, known.factors))
    numbers = *map(_wide, betas), steps, _wide(rate())
    function = _traced(_prepared, tuple(moment.shape), moment.dtype)
    weights = tf.convert_to_tensor(unwrap(variable))
    return moment.assign(function(*own, *arrived, *numbers, weights))


def _far(weights: Any, rate: Any) -> Any:
    """How far a variable's elements may move in an update, divided by the learning rate: []."""
    rms = tf.sqrt(tf.reduce_mean(tf.square(weights)))
    most = FARTHEST * rms / tf.maximum(tf.cast(rate, rms.dtype), SLOWEST)
    return tf.clip_by_value(most, 1.0, FREE)


def _square_of(optimizer: Any, variable: Any) -> Any:
    """Return the tf.Variable with Adam's mean square of a variable; None: there is none yet."""
    if is_legacy(optimizer):
        return optimizer.get_slot(variable, "v") if optimizer._slots else None
    if not getattr(optimizer, "_velocities", None):
        return None
    try:
        return slot_of(optimizer, variable, "_velocities")
    except KeyError:  # a variable that the optimizer does not know yet
        return None


def _wide(number: Any) -> Any:
    """Convert a number or a scalar to float64; a number by way of no other dtype."""
    if isinstance(number, int | float):
        return tf.constant(number, tf.float64)
    return tf.cast(number, tf.float64)


def _prepared(
    moment: Any,
    square: Any,
    gradient: Any,
    arrivals: Any,
    factors: Any,
    beta1: Any,
    beta2: Any,
    steps: Any,
    rate: Any,
    weights: Any,
) -> Any:
    """Compute the first moment that the optimizer has to begin its update with.

    Args:
        moment, square: both moments after `steps` updates.
        gradient: the gradient of the next one.
        arrivals: phi of each element, flat.
        factors: c of each class.
        beta1, beta2: the optimizer's, [] float64.
        steps: number of updates so far, [] float64.
        rate: the learning rate, [] float64.
        weights: the variable's value.
    """
    before, now = 1.0 - tf.pow(beta1, steps), 1.0 - tf.pow(beta1, steps + 1.0)
    again = tf.cast(tf.math.divide_no_nan(now, before), moment.dtype)  # 0 in the first update
    first, fresh, now = (tf.cast(each, moment.dtype) for each in (beta1, 1.0 - beta1, now))
    arrivals, factors = (tf.cast(each, moment.dtype) for each in (arrivals, factors))
    arrivals = tf.reshape(arrivals, moment.shape)
    kept = first * tf.sqrt(arrivals)
    has_arrived = tf.cast(tf.not_equal(gradient, 0), moment.dtype)
    factor = tf.where(arrived_often(arrivals, has_arrived), factors[0], factors[1])
    wanted = again * kept * moment + now * (1.0 - kept) * factor * gradient
    correction2 = 1.0 - tf.pow(beta2, steps + 1.0)
    numbers = beta2 / correction2, (1.0 - beta2) / correction2
    fading, added = (tf.cast(each, moment.dtype) for each in numbers)
    far = tf.cast(_far(weights, rate), now.dtype)
    far = tf.where(is_young(beta1, steps + 1.0), tf.ones_like(far), far)
    most = far * now * tf.sqrt(fading * square + added * tf.square(gradient))
    moved = tf.maximum(tf.minimum(wanted, most), -most)
    prepared = (moved - fresh * gradient) / first
    return tf.where(tf.equal(steps, 0.0), moment, prepared)
