"""Where states are found again: by what was asked, and for which variables."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from horovod_topk.config import TopKConfig
from horovod_topk.tensorflow.planning import Settings, unwrap
from horovod_topk.tensorflow.residuals import Stores
from horovod_topk.tensorflow.state import OptimizerState


class Memory:
    """What one optimizer, or all tapes of equal settings, keep for variables that live."""

    def __init__(self) -> None:
        self._kept = Stores()
        self._states: dict[tuple[object, ...], OptimizerState] = {}

    def state_of(
        self, config: TopKConfig, variables: Sequence[Any], settings: Settings
    ) -> OptimizerState:
        """The state for a list of variables; it ends with the first of them."""
        inner = [unwrap(variable) for variable in variables]
        key = settings.key, tuple(map(id, inner))
        state = self._states.get(key)
        if state is None:
            state = OptimizerState(config, variables, settings, self._kept)
            self._states[key] = state
            for variable in inner:
                weakref.finalize(variable, self._states.pop, key, None)
        return state
