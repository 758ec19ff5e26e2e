"""Compressors for models that FSDP2 has sharded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from horovod_topk.core.run.attached import Forwarded
from horovod_topk.core.run.base_compressor import on_class_too
from horovod_topk.fsdp.refusals import check_model, group_of
from horovod_topk.fsdp.state import FSDPState
from horovod_topk.methods.topk import Presets, TopK
from horovod_topk.torch_training.in_backward import BackwardCompressor, listed


class Compressor(BackwardCompressor):
    """A compression method for the gradients of FSDP2 between nodes; each subclass has one.

    `attach(model, optimizer, between=mesh["replicate"])` compresses a model's gradients;
    `.of(model)` returns its state.

    A rank compresses its shard of each gradient, in the parameter's dtype, once FSDP2 has added it
    up within the node. Its residual is as large as the shard.

    Raises:
        ConfigError, UnknownSettingError: a setting is out of its range, does not fit another one,
            or does not exist.

    Example:
        >>> fully_shard(model, mesh=mesh["shard"])
        >>> TopKEF().attach(model, optimizer, between=mesh["replicate"])
    """

    adapter = "fsdp"
    part = Forwarded()

    @on_class_too
    def attach(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        between: DeviceMesh | dist.ProcessGroup,
        groups: Sequence[Sequence[Any]] | None = None,
    ) -> None:
        """Compress a model's gradients. Call it on every rank, before the first backward.

        Call it again, between two steps, to replace the optimizer by a new one: residuals stay, and
        momentum, warm-up, statistics and the guard start anew. `of(model)` is another state then.

        Args:
            model: the root module that `fully_shard` has sharded over a mesh of one dimension.
            optimizer: the optimizer of all parameters that the model trains, and of no others; or
                a list of optimizers that have each of these parameters once.
            between: the mesh of one dimension, or the process group, of the ranks that have the
                same shard.
            groups: lists of parameters that are compressed and sent together. Others fill buckets
                of 25 MiB, from the last parameter to the first.

        Raises:
            ConfigError, UnsupportedOperationError: model, mesh, optimizer and settings cannot be
                combined.
            PlanMismatchError: ranks have different models or settings.
        """
        check_model(model)
        group = group_of(between, model)
        if name := self._agrees_on_horovods(group):
            if group.size() > 1:
                _average(model, group, name)
            return
        optimizers = listed(optimizer)
        before: FSDPState | None = getattr(model, "_topkef", None)
        if before is not None:
            before.check_is_new(optimizers)
        state = FSDPState(model, optimizers, self, group, groups, before)
        vars(model)["_topkef"] = state
        self.attached(state)

    @staticmethod
    def of(model: nn.Module | None = None) -> FSDPState:
        """Return the error-feedback state of a model.

        Raises:
            NotAttachedError: no compressor is attached to it.
        """
        if isinstance(found := getattr(model, "_topkef", None), FSDPState):
            return found
        return Compressor._by_horovod(  # type: ignore[no-any-return]
            f"no compressor is attached to this {type(model).__name__}",
            cure="Call TopKEF().attach(model, optimizer, between=mesh['replicate']), and pass the "
            "same model",
        )


def _average(model: nn.Module, group: dist.ProcessGroup, name: str) -> None:
    """Have FSDP2 average gradients between nodes by itself, in their dtype or in float16.

    name: "none" or "fp16", as in an environment variable (`core.run.substitute`).
    """

    def hook(gradients: Tensor) -> None:
        sent = gradients.half() if name == "fp16" else gradients
        dist.all_reduce(sent.div_(group.size()), group=group)
        gradients.copy_(sent)

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(hook)


class TopKEF(Compressor, Presets, method=TopK):
    """Documented by `core.run.base_compressor.documentation`."""
