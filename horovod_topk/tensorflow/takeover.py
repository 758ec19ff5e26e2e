"""A momentum that was taken over from a Keras optimizer, and how a guard hands it back.

While momentum is corrected, the optimizer applies none of its own. After a fall-back it applies its
own momentum again (`horovod_topk.core.guard`):

    handing over   the exchanged gradient is 1 - m times the mean velocity. The optimizer takes it
                   as its momentum
    dense          the optimizer updates variables as if it were not distributed

A graph has both updates, under a condition on the guard's stage in the step whose gradients are
applied.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from horovod_topk.core.guard import DENSE, HANDING_OVER
from horovod_topk.core.momentum_takeover import warn_of_loaded, warn_of_unknown
from horovod_topk.errors import UnsupportedOperationError
from horovod_topk.tensorflow.planning import unwrap
from horovod_topk.tensorflow.state import OptimizerState


@dataclass
class Taken:
    """A momentum that was taken over: the optimizer applies none, but is saved with it."""

    setting: str  # the optimizer's argument: "momentum" or "beta_1"
    value: float
    may_leave: bool = field(default=False, compare=False)  # momentum="auto": may be given back
    is_over: bool = field(default=True, compare=False)  # False: it was given back
    warnings: list[str] = field(default_factory=list, compare=False)
    hands_over: bool = field(default=False, compare=False)  # whether a guard can hand it back
    returns: bool = field(default=False, compare=False)  # whether it is taken over again later
    # Whether a state dict, loaded before the first step, is of a run with the momentum handed back.
    waits: Callable[[], bool] = field(default=lambda: False, compare=False)
    _states: weakref.WeakValueDictionary[int, OptimizerState] = field(
        default_factory=weakref.WeakValueDictionary, compare=False, repr=False
    )  # state of the exchange of each variable, by its id, if there is a guard

    @property
    def step(self) -> float:
        """Factor of SGD's updates, 1 / (1 - m): exchanged gradients are 1 - m times velocities."""
        return 1.0 / (1.0 - self.value) if self.setting == "momentum" and self.is_over else 1.0

    @property
    def is_handed_over(self) -> bool:
        """Whether the guard has handed the momentum back, so that the optimizer's slots have it."""
        states = list(self._states.values())
        return any(state.has_handed_over for state in states) if states else self.waits()

    def follow(self, state: OptimizerState, variables: Iterable[Any]) -> None:
        """Follow the guard of these variables' exchange, if it can hand the momentum back."""
        if not (self.is_over and self.hands_over):
            return
        state.hand_over()
        for variable in variables:
            self._states[id(unwrap(variable))] = state

    def state_of(self, variables: Iterable[Any]) -> OptimizerState | None:
        """The state whose guard says how these variables are updated; None: there is no guard.

        Raises:
            UnsupportedOperationError: their gradients are of several exchanges.
        """
        found = {self._states.get(id(unwrap(variable))) for variable in variables}
        if len(found) > 1:
            raise UnsupportedOperationError(
                "gradients of several exchanges were applied at once, each of which has a guard",
                cure="Call apply_gradients once for each compute_gradients, or pass guard=None",
            )
        return next(iter(found), None)

    def leave_narrow(self, optimizer: Any, variables: Iterable[Any]) -> list[str]:
        """Give the momentum back if settings allow it and a variable is narrower than float32.

        Args:
            optimizer: the optimizer of the momentum, before it has made its own variables.
            variables: the model's variables.

        Returns:
            The warnings that were given: one or none.
        """
        if not (self.may_leave and self.is_over):
            return []
        for inner in map(unwrap, variables):
            if inner.dtype not in (tf.float32, tf.float64):
                self.is_over, kind = False, type(optimizer).__name__
                set_momentum(optimizer, self.setting, self.value)
                why = f"variable {inner.name!r} is {inner.dtype.name}"
                return [warn_of_unknown(kind, why)]
        return []

    def warn_of_loaded(self, optimizer: Any) -> None:
        """Warn that loaded momentum variables are ignored."""
        self.warnings.append(warn_of_loaded(type(optimizer).__name__))

    @contextlib.contextmanager
    def handed_to(self, optimizer: Any) -> Iterator[None]:
        """Let the optimizer apply its momentum itself, while its variables or updates are built."""
        self.is_over = False
        setattr(optimizer, self.setting, self.value)
        try:
            yield
        finally:
            self.is_over = True
            setattr(optimizer, self.setting, 0.0)


def update_by_stage(
    optimizer: Any,
    taken: Taken,
    pairs: Sequence[tuple[Any, Any]],
    update: Callable[[], object],
    rate: Callable[[], Any],
) -> None:
    """Update variables, with the optimizer's own momentum or without, as the guard's stage says.

    Args:
        optimizer: of Keras 3 or tf-keras.
        taken: the momentum that was taken over from it.
        pairs: exchanged gradients, each with its variable.
        update: updates all variables by the optimizer's own function.
        rate: returns the learning rate of the update.
    """
    state = taken.state_of(variable for _, variable in pairs)
    if state is None:
        update()
        _clear(optimizer, taken, pairs)
        return
    stage = state.stage

    def corrected() -> None:
        update()
        tf.cond(
            tf.equal(stage, HANDING_OVER),
            lambda: _fill(optimizer, taken, pairs, rate),
            lambda: _clear(optimizer, taken, pairs),
        )

    def dense() -> None:
        with taken.handed_to(optimizer):
            update()
        if taken.returns:
            _keep_velocities(optimizer, taken, state, pairs, rate)

    tf.cond(tf.equal(stage, DENSE), dense, corrected)


def _fill(
    optimizer: Any, taken: Taken, pairs: Sequence[tuple[Any, Any]], rate: Callable[[], Any]
) -> None:
    """Write the optimizer's momentum after a step with the mean velocities.

    The slot of Adam and AdamW has 1 - m times the velocity, as the gradient has. That of SGD has
    the velocity times the learning rate, with a minus sign. Where the update has written the slot,
    it has this value already.
    """
    for gradient, variable in pairs if not _writes_slots(optimizer, taken) else ():
        slot = slot_of(optimizer, variable)
        scale = tf.cast(rate(), slot.dtype) * tf.cast(taken.step, slot.dtype)
        slot.assign(-scale * tf.cast(gradient, slot.dtype))


def _clear(optimizer: Any, taken: Taken, pairs: Sequence[tuple[Any, Any]]) -> None:
    """Write zeros where the update has written momentum slots, as they are saved."""
    for _, variable in pairs if taken.is_over and _writes_slots(optimizer, taken) else ():
        slot = slot_of(optimizer, variable)
        slot.assign(tf.zeros_like(slot))


def _keep_velocities(
    optimizer: Any,
    taken: Taken,
    state: OptimizerState,
    pairs: Sequence[tuple[Any, Any]],
    rate: Callable[[], Any],
) -> None:
    """Write the optimizer's momentum to TopKEF's velocities, to begin with after a cool-down."""
    for _, variable in pairs:
        velocity, slot = state.velocity_of(variable), slot_of(optimizer, variable)
        if taken.setting == "momentum":
            found = tf.math.divide_no_nan(-slot, tf.cast(rate(), slot.dtype))
        else:
            found = slot / (1.0 - taken.value)
        velocity.assign(tf.reshape(found, [-1]))


def _writes_slots(optimizer: Any, taken: Taken) -> bool:
    """Whether updates without momentum write slots; SGD of Keras 3 does not."""
    return taken.setting != "momentum" or hasattr(optimizer, "_index_dict")


def is_legacy(optimizer: Any) -> bool:
    """Whether an optimizer is one of `tf_keras.optimizers.legacy`."""
    return hasattr(optimizer, "_hyper")


def has_gathered(optimizer: Any) -> bool:
    """Whether any of an optimizer's momentum variables has a value other than zero."""
    return any(bool(tf.math.count_nonzero(unwrap(slot))) for slot in slots_of(optimizer))


def slots_of(optimizer: Any) -> list[Any]:
    """An optimizer's momentum variables."""
    slots = getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", None) or []
    if is_legacy(optimizer):
        slots = [own.get("m", own.get("momentum")) for own in optimizer._slots.values()]
    return [slot for slot in slots if slot is not None]


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


def set_momentum(optimizer: Any, setting: str, value: float) -> None:
    """Set a Keras optimizer's momentum, before it has made variables for it."""
    if is_legacy(optimizer):  # whose SGD would make velocities
        optimizer._set_hyper(setting, value)
        optimizer._momentum = setting == "momentum" and value > 0.0
    else:
        setattr(optimizer, setting, value)
