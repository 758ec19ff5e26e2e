"""Finds the state for a list of variables and settings, in each step and trace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from horovod_topk.errors import ConfigError
from horovod_topk.methods.protocol import Method
from horovod_topk.ratios import made_again
from horovod_topk.tensorflow.planning import TapeSettings, unwrap
from horovod_topk.tensorflow.state import OptimizerState
from horovod_topk.tensorflow.variables import Kept, Stores

Key = tuple[tuple[object, ...], tuple[int, ...]]  # of settings, and ids of variables


class Memory:
    """The states of one optimizer, or of all tapes of equal settings, while variables exist.

    The memory of an optimizer is deleted with it; nothing else may hold a reference.

    Args:
        warnings: warnings about the optimizer, for `stats()`.
    """

    def __init__(self, warnings: Iterable[str] = ()) -> None:
        self._stores, self.warnings = Stores(), [*warnings]
        self._states = Kept[Key, OptimizerState]()

    def __contains__(self, state: OptimizerState) -> bool:
        """Whether a state is still kept here, so that its variables exist."""
        return any(each is state for each in self._states.values())

    def keeps(self, variables: Sequence[Any], settings: TapeSettings) -> bool:
        """Return whether a state exists that covers these variables."""
        return self._find(*_key_of(variables, settings)) is not None

    def state_of(
        self, config: Method, variables: Sequence[Any], settings: TapeSettings
    ) -> OptimizerState:
        """Return the state of a list of variables; create one if the list is new.

        Some of these variables, as while layers are frozen, have the same state. It is deleted
        when the first of its variables is.
        """
        key = _key_of(variables, settings)
        state = self._find(*key)
        if state is None:
            state = OptimizerState(config, variables, settings, self._stores)
            state.warnings = self.warnings
            self._states.keep(key, state, variables)
        return state

    def _find(self, own: tuple[object, ...], ids: tuple[int, ...]) -> OptimizerState | None:
        """Find the state of these variables, or the first one that has them among others."""
        if (own, ids) in self._states:
            return self._states[own, ids]
        sharing = (
            state
            for (theirs, known), state in self._states.items()
            if theirs == own and {*ids} <= {*known}
        )
        return next(sharing, None)


# The states of tapes. Scripts build a new tape in each step, and may build a new compressor.
_of_tapes: dict[Method, Memory] = {}


def memory_of_tapes(config: Method, variables: Sequence[Any], settings: TapeSettings) -> Memory:
    """The memory that all tapes of equal settings share."""
    memory = _of_tapes.get(config)
    if memory is None:
        for other, kept in _of_tapes.items():
            if kept.keeps(variables, settings):
                _check_not_made_again(config, other)
        memory = _of_tapes[config] = Memory()
    return memory


def _check_not_made_again(config: Method, before: Method) -> None:
    predicate = made_again(config.ratios, before.ratios)
    if predicate is not None and replace(config, ratios=before.ratios) == before:
        raise ConfigError(
            f"ratio: {predicate} was made again for variables that have a residual, and refers to "
            "what cannot be compared, such as a list: what is owed would be forgotten each time",
            cure="Build TopKEF(...) once, before the first step, or have the predicate refer to a "
            "tuple or frozenset instead",
        )


def _key_of(variables: Sequence[Any], settings: TapeSettings) -> Key:
    return settings.key, tuple(id(unwrap(variable)) for variable in variables)
