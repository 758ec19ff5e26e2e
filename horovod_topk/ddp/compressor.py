"""Compressors, and the function that DistributedDataParallel calls for each of its buckets.

PyTorch compares the annotations of such a function with types: in this file they must not be
strings (`from __future__ import annotations`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from horovod_topk.core.base_compressor import by_horovod
from horovod_topk.core.substitute import horovods
from horovod_topk.ddp.refusals import check_model
from horovod_topk.ddp.state import DDPState
from horovod_topk.errors import ConfigError, NotAttachedError
from horovod_topk.methods.topk import Presets, TopK
from horovod_topk.torch_training.compressor import TrainingCompressor

Groups = Sequence[Sequence[Tensor]]
TORCHS = {"none": default_hooks.allreduce_hook, "fp16": default_hooks.fp16_compress_hook}


def exchange(
    state: DDPState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Compress and exchange a bucket of gradients: a hook for `register_comm_hook`.

    Args:
        state: what `TopKEF().hook(model, optimizer)` returned beside this function.
        bucket: gradients of this rank, not divided by the number of ranks.

    Returns:
        A future of the bucket's memory with the mean of all ranks' gradients, as they were sent.
    """
    return state.take(bucket)


class Compressor(TrainingCompressor):
    """A compression method for torch DistributedDataParallel; each of its subclasses has one.

    `attach(model, optimizer)` has a model's gradients compressed; `.of(model)` returns its state.

    Gradients may be float16, bfloat16, float32 or float64, of any shape. Residuals are float32, and
    float64 for float64 gradients.

    Args:
        grad_scaler: the `torch.amp.GradScaler` that scales the loss, if there is one. Residuals are
            then kept without the scale, so that they stay right when the scale changes.

    Raises:
        ConfigError, UnknownSettingError: a setting is out of range, fits no other, or is unknown.

    Example:
        >>> model = DistributedDataParallel(model)
        >>> TopKEF(ratio=0.001).attach(model, optimizer)
    """

    adapter = "ddp"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.commit_dir is not None:
            raise ConfigError(
                "commit_dir= is for Horovod's elastic jobs",
                cure="Save residuals with horovod_topk.checkpoint; torchrun restarts all ranks",
            )

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
        arguments = self.hook(model, optimizer, groups)  # which refuses what is no DDP
        model.register_comm_hook(*arguments)

    def hook(
        self, model: DistributedDataParallel, optimizer: Optimizer, groups: Groups | None = None
    ) -> tuple[Any, Callable[..., Any]]:
        """The two arguments of `model.register_comm_hook`; see `attach`.

        Register them at once: from here on, the optimizer refuses gradients that do not come so.
        """
        check_model(model)
        if self.asked(self) is None and (name := horovods()):
            return model.process_group, TORCHS[name]
        state = DDPState(model, optimizer, self, groups)
        self.attached(state)
        return state, exchange

    @staticmethod
    def of(model: DistributedDataParallel) -> DDPState:
        """Return the error-feedback state of a model.

        Raises:
            NotAttachedError: no compressor is attached to it.
        """
        for _, state in reversed(getattr(model, "_comm_hooks", ())):
            if isinstance(state, DDPState):
                return state
        if name := horovods():
            return by_horovod(name, "torch")  # type: ignore[no-any-return]
        raise NotAttachedError(
            f"no compressor's hook is registered with this {type(model).__name__}",
            cure="Call TopKEF().attach(model, optimizer), and pass that model",
        )


class TopKEF(Compressor, Presets, method=TopK):
    """Documented by `horovod_topk.core.base_compressor.documentation`."""
