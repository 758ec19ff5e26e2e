"""Momentum takeover of Keras 3 optimizers: they apply no momentum, but are saved with it.

A saved model has the user's momentum setting, and zeros as its slots. Loaded without Horovod, Keras
applies the momentum; wrapped again, the momentum is taken over again. After a fall-back of the
guard, slots have the momentum that it has handed back, and are saved with it.
"""

from __future__ import annotations

import contextlib
from typing import Any

import keras

from horovod_topk.core.momentum_takeover import note_taken
from horovod_topk.errors import ConfigError
from horovod_topk.tensorflow.takeover import Taken, has_gathered, slots_of, update_by_stage


def taking(optimizer: Any, taken: Taken) -> Any:
    """Make the class, of the same name, for a copy of an optimizer that applies no momentum.

    If the optimizer's momentum slots are not zero, they are dropped with a warning: one rank may
    have loaded a checkpoint, and all ranks have to do the same.

    Raises:
        ConfigError: the slots are not zero, and momentum is "optimizer".
    """
    base = type(optimizer)
    _check_fresh(optimizer, taken)
    note_taken(base.__name__, taken.value)
    members = {"__module__": base.__module__, "__doc__": base.__doc__, "_topkef_taken": taken}
    return type(base.__name__, (_AppliesNone, base), members)


def _check_fresh(optimizer: Any, taken: Taken) -> None:
    if taken.is_handed_over or not has_gathered(optimizer):
        return
    if not taken.may_leave:
        raise _would_be_lost(type(optimizer).__name__, taken)
    taken.warn_of_loaded(optimizer)


def drop_gathered(optimizer: Any, taken: Taken) -> None:
    """Set the momentum slots of an optimizer's copy to zero, if momentum is taken over."""
    dropped = taken.is_over and not taken.is_handed_over
    for slot in slots_of(_holder(optimizer)) if dropped else ():
        slot.assign(keras.ops.zeros_like(slot))


def _would_be_lost(kind: str, taken: Taken) -> ConfigError:
    return ConfigError(
        f"momentum='optimizer' was given, and {kind} has trained with {taken.setting}="
        f"{taken.value}: what that has gathered would be lost",
        cure="Pass an optimizer that has not trained yet, or leave momentum= out",
    )


class SavesSlots:
    """Mixin for an optimizer, or a loss scale around one, whose momentum is taken over."""

    def save_own_variables(self, store: Any) -> None:
        """As the base class, with zeros as the momentum."""
        this: Any = self
        taken = _holder(self)._topkef_taken
        if not taken.is_over or taken.is_handed_over:
            super().save_own_variables(store)  # type: ignore[misc]
            return
        super().save_own_variables(_Blanking(store, _places(self)))  # type: ignore[misc]
        for i, variable in enumerate(_without_slots(_holder(self)), start=len(this.variables)):
            store[str(i)] = _zeros(variable)

    def load_own_variables(self, store: Any) -> None:
        """As the base class, without the momentum, unless a guard has handed it back.

        With momentum="auto", dropping a momentum that is not zero causes a warning.

        Raises:
            ConfigError: a momentum would be lost, and momentum is "optimizer"; nothing has changed.
        """
        this: Any = self
        holder, known = _holder(self), len(this.variables)
        taken = holder._topkef_taken
        surplus = {str(known + i) for i in range(len(_without_slots(holder)))}
        drops = taken.is_over and not taken.is_handed_over
        if drops and len(store.keys()) == known + len(surplus):
            mine = _places(self)
            if any(keras.ops.any(store[place]) for place in surplus | mine):
                if not taken.may_leave:
                    raise _would_be_lost(type(holder).__name__, taken)
                taken.warn_of_loaded(holder)
            kept = {str(i): store[str(i)] for i in range(known)}
            store = {i: _zeros(value) if i in mine else value for i, value in kept.items()}
        super().load_own_variables(store)  # type: ignore[misc]


class _Blanking:
    """A store wrapper that writes zeros in some places."""

    def __init__(self, store: Any, places: set[str]) -> None:
        self._store, self._places = store, places

    def __setitem__(self, place: str, value: Any) -> None:
        self._store[place] = _zeros(value) if place in self._places else value


class _AppliesNone(SavesSlots):
    """Mixin for a Keras 3 optimizer that applies no momentum."""

    _topkef_taken: Taken

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        setattr(self, self._topkef_taken.setting, 0.0)

    def build(self, variables: Any) -> None:
        """As the base class; the optimizer gets its momentum back if a velocity would not fit.

        SGD makes slots only for a momentum: it gets some if a guard can hand one back.
        """
        this: Any = self
        base: Any = super()
        taken = self._topkef_taken
        if not this.built:
            taken.leave_narrow(self, variables)
        makes_slots = taken.hands_over and taken.is_over
        with taken.handed_to(self) if makes_slots else contextlib.nullcontext():
            base.build(variables)

    def _backend_update_step(self, grads: Any, variables: Any, learning_rate: Any) -> None:
        """As the base class, then write zeros to momentum slots; or as the guard's stage says."""
        base: Any = super()

        def update() -> None:
            base._backend_update_step(grads, variables, learning_rate)

        pairs = list(zip(grads, variables, strict=True))
        update_by_stage(self, self._topkef_taken, pairs, update, lambda: learning_rate)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update a variable at the learning rate that fits an exchanged velocity."""
        rate = learning_rate * self._topkef_taken.step
        super().update_step(gradient, variable, rate)  # type: ignore[misc]

    def get_config(self) -> dict[str, Any]:
        """As the base class, with the user's momentum."""
        config: dict[str, Any] = super().get_config()  # type: ignore[misc]
        return config | {self._topkef_taken.setting: self._topkef_taken.value}


def _places(optimizer: Any) -> set[str]:
    """The keys under which an optimizer saves its momentum slots."""
    slots = {id(slot) for slot in slots_of(_holder(optimizer))}
    return {str(i) for i, variable in enumerate(optimizer.variables) if id(variable) in slots}


def _zeros(like: Any) -> Any:
    """NumPy zeros of a variable's shape, to be saved."""
    return keras.ops.convert_to_numpy(keras.ops.zeros_like(like))


def _holder(optimizer: Any) -> Any:
    """The optimizer that has the momentum: the one inside a loss scale, or itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def _without_slots(optimizer: Any) -> list[Any]:
    """The model's variables that have no momentum slot, as momentum is taken over."""
    if slots_of(optimizer) or not optimizer.built:
        return []
    everything = optimizer._trainable_variables
    return [v for v in everything if not optimizer._overwrite_variable_with_gradient(v)]
