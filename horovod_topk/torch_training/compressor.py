"""The base class of the compressors of both PyTorch adapters."""

from __future__ import annotations

import weakref
from typing import Any

from horovod_topk import reporting
from horovod_topk.core.run.base_compressor import BaseCompressor
from horovod_topk.torch_training.scaling import check_scaler
from horovod_topk.torch_training.state import TrainingState


class TrainingCompressor(BaseCompressor):
    """A compressor with weak references to the states of the optimizers that use it."""

    framework = "torch"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._begin()

    def _begin(self) -> None:
        self._states: weakref.WeakSet[TrainingState] = weakref.WeakSet()

    def attached(self, state: TrainingState) -> None:
        """Remember an optimizer's state."""
        self._states.add(state)
        reporting.watch(state)

    @staticmethod
    def _check_scaler(scaler: object) -> None:
        check_scaler(scaler)

    def _living_states(self) -> list[TrainingState]:
        return list(self._states)
