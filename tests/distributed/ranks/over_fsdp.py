"""The verbs of `over_torch` for FSDP2: every rank is a node of its own, with one whole shard."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from horovod_topk import fsdp
from over_torch import *  # noqa: F403
from over_torch import size, skip_synchronize


class TopKEF(fsdp.TopKEF):
    """Found by the optimizer, as Horovod's is."""

    @staticmethod
    def of(optimizer: Any) -> Any:
        return fsdp.TopKEF.of(optimizer.fsdp)


def mesh() -> DeviceMesh:
    """Nodes of one rank."""
    return init_device_mesh("cpu", (size(), 1), mesh_dim_names=("replicate", "shard"))


def distributed(
    task: nn.Module, optimizer: Any, compression: Any, groups: Any = None, **options: Any
) -> Any:
    """Attach to a task that `sharded` has sharded."""
    optimizer.fsdp = task
    optimizer.synchronize = lambda: None
    optimizer.skip_synchronize = skip_synchronize
    if compression is None:
        task.set_all_reduce_hook(_averaged)
    else:
        compression = compression() if isinstance(compression, type) else compression
        compression.attach(task, optimizer, mesh()["replicate"], groups)
    return optimizer


def _averaged(gradients: Tensor) -> None:
    """Dense: what FSDP2's users do between nodes without a compressor."""
    dist.all_reduce(gradients)
    gradients.div_(size())


def sharded(task: nn.Module) -> nn.Module:
    """Shard a task: its forward is `task.loss` from here on."""
    fully_shard(task, mesh=mesh()["shard"])
    task.__dict__["loss"] = task.__call__
    return task
