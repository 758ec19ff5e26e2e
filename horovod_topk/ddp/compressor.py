"""Compressors: what a user attaches to a model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from horovod_topk import reporting
from horovod_topk.core.base_compressor import BaseCompressor, by_horovod
from horovod_topk.core.substitute import horovods
from horovod_topk.ddp.hook import exchange
from horovod_topk.ddp.refusals import check_model
from horovod_topk.ddp.state import DDPState, state_of
from horovod_topk.errors import ConfigError, NotAttachedError
from horovod_topk.methods.topk import Presets, TopK
from horovod_topk.torch_training.scaling import check_scaler

Groups = Sequence[Sequence[Tensor]]
TORCHS = {"none": default_hooks.allreduce_hook, "fp16": default_hooks.fp16_compress_hook}


class Compressor(BaseCompressor):
    """A compression method for torch DistributedDataParallel; each of its subclasses has one.

    `attach(model, optimizer)` has the model's gradients compressed; `.of(model)` returns the state
    behind it. Each model has a state of its own, also when several share one instance.

    Gradients may be float16, bfloat16, float32 or float64, of any shape. Residuals are float32, and
    float64 for float64 gradients.

    Args:
        grad_scaler: the `torch.amp.GradScaler` that scales the loss, if there is one. Residuals are
            then kept without the scale, so that they stay right when the scale changes.

    Raises:
        ConfigError, UnknownSettingError: a setting is out of its range, does not fit another one,
            or does not exist.

    Example:
        >>> model = DistributedDataParallel(model)
        >>> TopKEF(ratio=0.001).attach(model, optimizer)
    """

    framework, adapter = "torch", "ddp"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.commit_dir is not None:
            raise ConfigError(
                "commit_dir= is for Horovod's elastic jobs",
                cure="Save residuals with horovod_topk.checkpoint; torchrun restarts all ranks",
            )
        self._begin()

    def _begin(self) -> None:
        self._states: weakref.WeakSet[DDPState] = weakref.WeakSet()

    def attach(
        self, model: DistributedDataParallel, optimizer: Optimizer, groups: Groups | None = None
    ) -> None:
        """Have a model's gradients compressed. Call it on every rank, before the first backward.

        Args:
            model: the wrapped model, without a communication hook.
            optimizer: of all parameters that the model trains, and of no others.
            groups: lists of parameters that are compressed and sent together. Others fill buckets
                of 25 MiB, from the last parameter to the first.

        Raises:
            ConfigError, UnsupportedOperationError: model, optimizer and settings do not go
                together.
            PlanMismatchError: ranks have different models or settings.
        """
        model.register_comm_hook(*self.hook(model, optimizer, groups))

    def hook(
        self, model: DistributedDataParallel, optimizer: Optimizer, groups: Groups | None = None
    ) -> tuple[Any, Callable[..., Any]]:
        """The two arguments of `model.register_comm_hook`; see `attach`.

        Register them before the first backward: the optimizer's steps wait for exchanged gradients
        from here on.
        """
        hooks = getattr(model, "_comm_hooks", ())
        check_model(model, [each for each in hooks if not _is_of_a_copy(each)])
        if name := horovods():
            return model.process_group, TORCHS[name]
        state = DDPState(model, optimizer, self, groups)
        self._states.add(state)
        reporting.watch(state)
        return state, exchange

    @staticmethod
    def of(model: DistributedDataParallel) -> DDPState:
        """Return the error-feedback state of a model.

        Raises:
            NotAttachedError: no compressor is attached to it.
        """
        state = state_of(model)
        if state is None and (name := horovods()):
            return by_horovod(name, "torch")  # type: ignore[no-any-return]
        if state is None:
            raise NotAttachedError(
                f"no compressor's hook is registered with this {type(model).__name__}",
                cure="Call TopKEF().attach(model, optimizer), and pass that model",
            )
        return state

    def set_ratio(self, ratio: float | None) -> None:
        """As `DDPState.set_ratio`, of the one model behind this instance."""
        if not horovods():
            state = self._only_state()
            assert isinstance(state, DDPState)
            state.set_ratio(ratio)

    @staticmethod
    def _check_scaler(scaler: object) -> None:
        check_scaler(scaler)

    def _living_states(self) -> list[DDPState]:
        return list(self._states)


def _is_of_a_copy(registered: tuple[Any, Any]) -> bool:
    """Whether a hook was pickled with its model, which PyTorch does not register anew."""
    state = registered[1]
    return isinstance(state, DDPState) and state.is_copy


class TopKEF(Compressor, Presets, method=TopK):
    """Documented by `horovod_topk.core.base_compressor.documentation`."""
