"""The verbs of Horovod that cases use, over torch.distributed and DistributedDataParallel.

An optimizer that `distributed` returns exchanges in `backward()`, so that its `synchronize()` does
nothing, and steps as always inside `skip_synchronize()`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from horovod_topk import ddp
from horovod_topk.core.plan.nodes import Location
from horovod_topk.torch_training.collective import GroupCollective

LIMIT = timedelta(seconds=30)  # for a collective that some rank never joins
BUCKET = 0.001  # MiB: several of DDP's buckets even in small models


class Compression:
    """Where nothing of ours is to compress."""

    none = None


Sum = "sum"  # of Setups that are not for this launcher


class TopKEF(ddp.TopKEF):
    """Found by the optimizer, as Horovod's is."""

    @staticmethod
    def of(optimizer: Any) -> Any:
        return ddp.TopKEF.of(optimizer.ddp)


def place(monkeypatch: pytest.MonkeyPatch, location: Location) -> None:
    """Have this rank say that it runs there."""
    monkeypatch.setattr(GroupCollective, "location", location)


def begin() -> None:
    """Know the other ranks."""
    dist.init_process_group("gloo", timeout=LIMIT)


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def barrier() -> None:
    dist.barrier()


def broadcast_object(value: Any, root_rank: int = 0, name: str | None = None) -> Any:
    values = [value]
    dist.broadcast_object_list(values, root_rank)
    return values[0]


def allgather_object(value: Any, name: str | None = None) -> list[Any]:
    found = [None] * size()
    dist.all_gather_object(found, value)
    return found


def allgather(tensor: Tensor, name: str | None = None) -> Tensor:
    """Of tensors of one shape, behind each other."""
    found = [torch.empty_like(tensor) for _ in range(size())]
    dist.all_gather(found, tensor)
    return torch.cat(found)


def allreduce(tensor: Tensor, name: str | None = None, op: str = "average") -> Tensor:
    """The mean or the sum, as a new tensor."""
    total = tensor.detach().clone()
    dist.all_reduce(total)
    return total if op == Sum else total / size()


def broadcast_parameters(state: Mapping[str, Tensor], root_rank: int = 0) -> None:
    for tensor in state.values():
        dist.broadcast(tensor, root_rank)


def broadcast_optimizer_state(optimizer: Any, root_rank: int = 0) -> None:
    for state in optimizer.state.values():
        broadcast_parameters({k: v for k, v in state.items() if isinstance(v, Tensor)}, root_rank)


def distributed(
    task: nn.Module, optimizer: Any, compression: Any, groups: Any = None, **options: Any
) -> Any:
    """Wrap a task: `task.loss` goes through DistributedDataParallel from here on."""
    options = {"bucket_cap_mb": BUCKET, **getattr(task, "ddp_options", {}), **options}
    model = DistributedDataParallel(task, **options)
    task.__dict__["loss"] = model  # as an attribute, it would be a submodule of its own submodule
    optimizer.ddp = model
    optimizer.synchronize = lambda: None
    optimizer.skip_synchronize = skip_synchronize
    if compression is not None:
        compression = compression() if isinstance(compression, type) else compression
        compression.attach(model, optimizer, groups)
    return optimizer


def skip_synchronize() -> AbstractContextManager[None]:
    return nullcontext()
