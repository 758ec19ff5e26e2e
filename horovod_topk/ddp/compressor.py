"""Compressors for DistributedDataParallel, and the communication hook that it calls.

PyTorch compares the annotations of a communication hook with types: in this file they must not be
strings (`from __future__ import annotations`).
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from horovod_topk.core.run.base_compressor import on_class_too
from horovod_topk.core.run.substitute import horovods
from horovod_topk.ddp.refusals import check_model
from horovod_topk.ddp.state import DDPState
from horovod_topk.errors import ConfigError
from horovod_topk.methods.topk import Presets, TopK
from horovod_topk.torch_training.in_backward import BackwardCompressor, listed
from horovod_topk.torch_training.local_steps import LocalSteps, ParametersState
from horovod_topk.torch_training.tracing import untraced

Groups = Sequence[Sequence[Tensor]]
TORCHS = {"none": default_hooks.allreduce_hook, "fp16": default_hooks.fp16_compress_hook}


@untraced
def exchange(
    state: DDPState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Compress and exchange a bucket of gradients: a hook for `register_comm_hook`.

    Args:
        state: the state that `TopKEF().hook(model, optimizer)` returned with this function.
        bucket: gradients of this rank, not divided by the number of ranks.

    Returns:
        A future of the bucket's memory, with the mean of all ranks' compressed gradients.

    Raises:
        ConfigError: `state` is no such state, but a compressor, for example.
    """
    if not isinstance(state, DDPState):
        refuse_registering()
    return state.take(bucket)


def refuse_registering() -> NoReturn:
    """Refuse a compressor in the place of a communication hook or of its state."""
    raise ConfigError(
        "a compressor was passed to register_comm_hook, which takes a state and a hook",
        cure="Write TopKEF().attach(model, optimizer), or "
        "model.register_comm_hook(*TopKEF().hook(model, optimizer))",
    )


class _Signature(inspect.Signature):
    """Signature of a compressor class, which has no `bucket` as that of a hook has."""

    @property
    def parameters(self) -> Any:
        return defaultdict(refuse_registering, super().parameters)


class Compressor(BackwardCompressor):
    """A compression method for torch DistributedDataParallel; each of its subclasses has one.

    `attach(model, optimizer)` compresses a model's gradients; `.of(model)` returns its state.

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

    adapter = "ddp"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = inspect.signature(cls)
        cls.__signature__ = _Signature([*own.parameters.values()])  # type: ignore[attr-defined]

    @on_class_too
    def attach(
        self,
        model: DistributedDataParallel,
        optimizer: Optimizer | Sequence[Optimizer],
        groups: Groups | None = None,
    ) -> None:
        """Compress a model's gradients. Call it on every rank, before the first backward.

        Call it again, between two steps, to replace the optimizer by a new one: residuals stay, and
        momentum, warm-up, statistics and the guard start anew.

        Args:
            model: the wrapped model, without a communication hook of others.
            optimizer: the optimizer of all parameters that the model trains, and of no others; or
                a list of optimizers that have each of these parameters once.
            groups: lists of parameters that are compressed and sent together. Others fill buckets
                of 25 MiB, from the last parameter to the first.

        Raises:
            ConfigError, UnsupportedOperationError: model, optimizer and settings cannot be
                combined.
            PlanMismatchError: ranks have different models or settings.
        """
        hooks = getattr(model, "_comm_hooks", ())
        states = [s for _, s in hooks if isinstance(s, DDPState) and not s.is_copy]
        if states:
            states[0].replace(model, listed(optimizer), self, groups)
            self.attached(states[0])
        elif (name := horovods()) is None or TORCHS[name] not in [hook for hook, _ in hooks]:
            state, hook = self.hook(model, optimizer, groups)  # it refuses other models than DDP
            try:
                model.register_comm_hook(state, hook)
            except BaseException:
                if isinstance(state, DDPState):
                    state.detach()
                    self._states.discard(state)
                raise

    @on_class_too
    def hook(
        self,
        model: DistributedDataParallel,
        optimizer: Optimizer | Sequence[Optimizer],
        groups: Groups | None = None,
    ) -> tuple[Any, Callable[..., Any]]:
        """Return the two arguments of `model.register_comm_hook`; see `attach`.

        Register them at once: from now on, the optimizer refuses gradients that the hook has not
        exchanged.
        """
        check_model(model)
        if name := self._agrees_on_horovods(model.process_group):
            return model.process_group, TORCHS[name]
        state = DDPState(model, listed(optimizer), self, groups)
        self.attached(state)
        return state, exchange

    @staticmethod
    def of(
        model: DistributedDataParallel | LocalSteps | None = None,
    ) -> DDPState | ParametersState:
        """Return the error-feedback state of a model, or of a `LocalSteps`.

        Raises:
            NotAttachedError: no compressor is attached to it.
        """
        if isinstance(of_steps := getattr(model, "_topkef", None), ParametersState):
            return of_steps
        for _, state in reversed(getattr(model, "_comm_hooks", ())):
            if isinstance(state, DDPState):
                return state
        return Compressor._by_horovod(  # type: ignore[no-any-return]
            f"no compressor's hook is registered with this {type(model).__name__}",
            cure="Call TopKEF().attach(model, optimizer), and pass that model",
        )


class TopKEF(Compressor, Presets, method=TopK):
    """Documented by `core.run.base_compressor.documentation`."""
