"""Keras 3 optimizers whose momentum is taken over: they apply none, and are saved with it.

A saved model says what the user asked for, and has zeros where Keras would keep that momentum. So
it can be loaded without Horovod, where Keras applies the momentum, and wrapped again, where it is
taken over again.
"""

from __future__ import annotations

from typing import Any

import keras

from horovod_topk.core.momentum_takeover import note_taken
from horovod_topk.errors import ConfigError
from horovod_topk.tensorflow.momentum import Taken, has_gathered, slots_of


def taking(optimizer: Any, taken: Taken) -> Any:
    """The class for a copy of an optimizer that applies no momentum, of the same name.

    If its momentum has gathered something, that is dropped with a warning: one rank may have loaded
    a checkpoint, and all have to do the same.

    Raises:
        ConfigError: it has, and momentum is "optimizer".
    """
    base = type(optimizer)
    _check_fresh(optimizer, taken)
    note_taken(base.__name__, taken.value)
    members = {"__module__": base.__module__, "__doc__": base.__doc__, "_topkef_taken": taken}
    return type(base.__name__, (_AppliesNone, base), members)


def _check_fresh(optimizer: Any, taken: Taken) -> None:
    if not has_gathered(optimizer):
        return
    if not taken.may_leave:
        raise _would_be_lost(type(optimizer).__name__, taken)
    taken.warn_of_loaded(optimizer)


def drop_gathered(optimizer: Any, taken: Taken) -> None:
    """Have a copy of an optimizer start without a momentum, if that is taken over."""
    for slot in slots_of(_holder(optimizer)) if taken.is_over else ():
        slot.assign(keras.ops.zeros_like(slot))


def _would_be_lost(kind: str, taken: Taken) -> ConfigError:
    return ConfigError(
        f"momentum='optimizer' was given, and {kind} has trained with {taken.setting}="
        f"{taken.value}: what that has gathered would be lost",
        cure="Pass an optimizer that has not trained yet, or leave momentum= out",
    )


class SavesSlots:
    """Mixed in before an optimizer, or a loss scale around one, whose momentum was taken over."""

    def save_own_variables(self, store: Any) -> None:
        """As the base class, with zeros for the momentum."""
        this: Any = self
        if not _holder(self)._topkef_taken.is_over:
            super().save_own_variables(store)  # type: ignore[misc]
            return
        super().save_own_variables(_Blanking(store, _places(self)))  # type: ignore[misc]
        for i, variable in enumerate(_without_slots(_holder(self)), start=len(this.variables)):
            store[str(i)] = _zeros(variable)

    def load_own_variables(self, store: Any) -> None:
        """As the base class, without the momentum.

        Where momentum="auto" has taken it over, one that has gathered something is warned of.

        Raises:
            ConfigError: it would be lost, and momentum is "optimizer"; nothing has changed.
        """
        this: Any = self
        holder, known = _holder(self), len(this.variables)
        taken = holder._topkef_taken
        surplus = {str(known + i) for i in range(len(_without_slots(holder)))}
        if taken.is_over and len(store.keys()) == known + len(surplus):
            mine = _places(self)
            if any(keras.ops.any(store[place]) for place in surplus | mine):
                if not taken.may_leave:
                    raise _would_be_lost(type(holder).__name__, taken)
                taken.warn_of_loaded(holder)
            kept = {str(i): store[str(i)] for i in range(known)}
            store = {i: _zeros(value) if i in mine else value for i, value in kept.items()}
        super().load_own_variables(store)  # type: ignore[misc]


class _Blanking:
    """What is written to a store, with zeros in some places."""

    def __init__(self, store: Any, places: set[str]) -> None:
        self._store, self._places = store, places

    def __setitem__(self, place: str, value: Any) -> None:
        self._store[place] = _zeros(value) if place in self._places else value


class _AppliesNone(SavesSlots):
    """Mixed in before a Keras 3 optimizer."""

    _topkef_taken: Taken

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        setattr(self, self._topkef_taken.setting, 0.0)

    def build(self, variables: Any) -> None:
        """As the base class; it gets its momentum back for variables that no velocity fits."""
        this: Any = self
        if not this.built:
            self._topkef_taken.leave_narrow(self, variables)
        super().build(variables)  # type: ignore[misc]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """As the base class, in whose units gradients are (1 - m) times velocities."""
        this: Any = self
        rate = learning_rate * self._topkef_taken.step
        super().update_step(gradient, variable, rate)  # type: ignore[misc]
        if self._topkef_taken.is_over and (slots := slots_of(self)):
            slot = slots[this._get_variable_index(variable)]
            this.assign(slot, keras.ops.zeros_like(slot))  # else it is saved, and applied again

    def get_config(self) -> dict[str, Any]:
        """As the user made it."""
        config: dict[str, Any] = super().get_config()  # type: ignore[misc]
        return config | {self._topkef_taken.setting: self._topkef_taken.value}


def _places(optimizer: Any) -> set[str]:
    """Where an optimizer saves the variables that it keeps its momentum in."""
    slots = {id(slot) for slot in slots_of(_holder(optimizer))}
    return {str(i) for i, variable in enumerate(optimizer.variables) if id(variable) in slots}


def _zeros(like: Any) -> Any:
    """An array to be saved."""
    return keras.ops.convert_to_numpy(keras.ops.zeros_like(like))


def _holder(optimizer: Any) -> Any:
    """What has the momentum, within a loss scale or not."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def _without_slots(optimizer: Any) -> list[Any]:
    """The model's variables that momentum would be kept for, if none is."""
    if slots_of(optimizer) or not optimizer.built:
        return []
    everything = optimizer._trainable_variables
    return [v for v in everything if not optimizer._overwrite_variable_with_gradient(v)]
