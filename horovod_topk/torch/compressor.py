"""Compressors for Horovod's PyTorch optimizers, which users pass as `compression=`."""

from __future__ import annotations

import horovod.torch as hvd
import torch
from horovod.torch.compression import Compressor as HorovodCompressor

from horovod_topk.core.run.attached import ByHorovod
from horovod_topk.core.run.base_compressor import OverHorovod
from horovod_topk.core.run.substitute import horovods
from horovod_topk.elastic import Manager
from horovod_topk.errors import NotAttachedError
from horovod_topk.methods.topk import Presets, TopK
from horovod_topk.torch.collective import HorovodTalk
from horovod_topk.torch.state import OptimizerState
from horovod_topk.torch_training.local_steps import ParametersState
from horovod_topk.torch_training.state import TrainingCompressor, TrainingState


class Compressor(TrainingCompressor, OverHorovod, HorovodCompressor):  # type: ignore[misc]  # Horovod has no annotations
    """A compression method for PyTorch's Horovod; each of its subclasses has one.

    Pass the class (default settings) or an instance as
    `hvd.DistributedOptimizer(compression=...)`. Each optimizer has a state of its own, also when
    several share one instance; `.of(optimizer)` returns it.

    Gradients may be float16, bfloat16, float32 or float64, of any shape. Residuals are float32, and
    float64 for float64 gradients.

    Args:
        grad_scaler: the `torch.amp.GradScaler` that scales the loss, if there is one. Residuals are
            then kept without the scale, so that they stay right when the scale changes.

    Raises:
        ConfigError, UnknownSettingError: a setting is out of its range, does not fit another one,
            or does not exist.

    Example:
        >>> optimizer = hvd.DistributedOptimizer(
        ...     optimizer,
        ...     named_parameters=model.named_parameters(),
        ...     compression=TopKEF(ratio=0.001),
        ... )
    """

    adapter, horovod, takers = "torch", hvd, "hvd.DistributedOptimizer(compression=...)"

    def _begin(self) -> None:
        super()._begin()
        self._manager: Manager | None = None

    @staticmethod
    def of(
        optimizer: torch.optim.Optimizer | None = None,
    ) -> OptimizerState | ParametersState:
        """Return the error-feedback state of a distributed optimizer.

        Args:
            optimizer: the result of `hvd.DistributedOptimizer(..., compression=TopKEF)`, with the
                class or an instance; or a `LocalSteps`.

        Raises:
            NotAttachedError: the optimizer was not built with `compression=TopKEF`.
        """
        state = getattr(optimizer, "_topkef", None)
        if state is None and (name := horovods()):
            return ByHorovod(name, "torch")  # type: ignore[return-value]
        if not isinstance(state, OptimizerState | ParametersState):
            raise NotAttachedError(
                f"{type(optimizer).__name__} was not built with compression=TopKEF",
                cure="Pass what hvd.DistributedOptimizer(..., compression=TopKEF) returned",
            )
        return state

    def attached(self, state: TrainingState) -> None:
        """As `TrainingCompressor.attached`; called by `horovod_topk.torch.seam`."""
        if self._manager is not None:
            state.keep_with(self._manager)
        super().attached(state)

    def keep(self, name: str) -> Manager:
        """Keep residuals through an elastic job; called by `horovod_topk.torch.elastic`."""
        self._manager = Manager(self._living_states, HorovodTalk(), name)
        for state in self._living_states():
            state.keep_with(self._manager)
        return self._manager


class TopKEF(Compressor, Presets, method=TopK):
    """Documented by `core.run.base_compressor.documentation`."""
