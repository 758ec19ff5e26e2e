"""Where states are found again: by what was asked, and for which variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horovod_topk.config import TopKConfig
from horovod_topk.tensorflow.planning import Settings, unwrap
from horovod_topk.tensorflow.residuals import Stores, watched
from horovod_topk.tensorflow.state import OptimizerState

Key = tuple[object, ...]


class Memory:
    """What one optimizer, or all tapes of equal settings, keep for variables that live.

    An optimizer's ends with it; nothing else may hold one.
    """

    def __init__(self) -> None:
        self._kept = Stores()
        self._states: dict[Key, tuple[OptimizerState, list[object]]] = {}

    def __contains__(self, state: OptimizerState) -> bool:
        """Whether a state is still asked for here: its variables live."""
        return any(each is state for each, _ in self._states.values())

    def forget(self, key: Key) -> None:
        """End the state of variables of which one is no more."""
        self._states.pop(key, None)

    def state_of(
        self, config: TopKConfig, variables: Sequence[Any], settings: Settings
    ) -> OptimizerState:
        """The state for a list of variables; it ends with the first of them."""
        inner = [unwrap(variable) for variable in variables]
        key = settings.key, tuple(map(id, inner))
        if key not in self._states:
            state = OptimizerState(config, variables, settings, self._kept)
            self._states[key] = state, [watched(variable, self, key) for variable in inner]
        return self._states[key][0]
