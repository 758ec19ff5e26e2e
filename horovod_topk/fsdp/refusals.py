"""Models and meshes whose gradients cannot be compressed between the nodes of FSDP2."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from horovod_topk.config import Settings
from horovod_topk.errors import ConfigError, UnsupportedOperationError
from horovod_topk.torch_training.in_backward import check_is_no_optimizer
from horovod_topk.torch_training.onebit_adam import OneBitAdam

COMPILED_AUTOGRAD = "torch._dynamo.config.compiled_autograd"
MESH = 'Pass fully_shard(module, mesh=mesh["shard"]), and TopKEF the other dimension, between='


def check_model(model: Any) -> None:
    """Refuse a model whose gradients FSDP2 does not leave to the compressor."""
    check_is_no_optimizer(model)
    if not isinstance(model, FSDPModule):
        raise ConfigError(
            f"fully_shard was not called with this {type(model).__name__}",
            cure="Pass the root module, after fully_shard(model, mesh=mesh['shard']), and not what "
            "torch.compile(model) returns. DistributedDataParallel is for horovod_topk.ddp",
        )
    module: Any = model  # an FSDPModule is a Module
    for name, p in module.named_parameters():
        mesh = getattr(p, "device_mesh", None)
        if not p.requires_grad:
            continue
        if mesh is None:
            raise ConfigError(
                "fully_shard has not sharded it, and its gradients are of each rank alone",
                tensor=name,
                cure="Leave ignored_params= out, or set its requires_grad to False",
            )
        if mesh.ndim > 1:
            raise ConfigError(
                f"it is sharded over a mesh of {mesh.ndim} dimensions, so that PyTorch itself adds "
                "gradients up between nodes",
                tensor=name,
                cure=MESH,
            )


def group_of(between: Any, model: nn.Module) -> dist.ProcessGroup:
    """The process group of the ranks that have the same shard of a model."""
    if isinstance(between, DeviceMesh):
        if between.ndim != 1:
            raise ConfigError(
                f"between= is a mesh of {between.ndim} dimensions",
                cure='Pass one dimension, such as between=mesh["replicate"]',
            )
        between = between.get_group()
    if not isinstance(between, dist.ProcessGroup):
        raise ConfigError(
            f"between={between!r:.60} is neither a mesh nor a process group",
            cure='Pass between=mesh["replicate"], the dimension that fully_shard did not get',
        )
    ranks = {*dist.get_process_group_ranks(between)} - {dist.get_rank()}
    for name, p in model.named_parameters():
        mesh: Any = getattr(p, "device_mesh", None)
        if mesh is not None and (shared := ranks & {*mesh.mesh.flatten().tolist()}):
            raise ConfigError(
                f"FSDP2 shards it among ranks that between= has too, such as {min(shared)}",
                tensor=name,
                cure='Pass the dimension that fully_shard did not get, between=mesh["replicate"]',
            )
    return between


def check_backward() -> None:
    """Refuse a compiled backward, in which PyTorch leaves out the last hook of FSDP2."""
    compiled: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    if getattr(compiled, "in_compiled_autograd_region", False):
        raise UnsupportedOperationError(
            "backward() runs in compiled autograd, which leaves out the last hook of FSDP2: the "
            "first unit's gradients are not reduced, with or without compression",
            cure=f"Set {COMPILED_AUTOGRAD} to False; the model's forward may be compiled",
        )


def check_settings(optimizers: Sequence[Any], config: Settings) -> None:
    """Refuse optimizers and settings that need whole gradients."""
    if config.clip_norm is not None:
        raise ConfigError(
            f"clip_norm={config.clip_norm:g} was given, and a rank knows the norm of its shards "
            "alone",
            cure="Clip after backward(), with torch.nn.utils.clip_grad_norm_",
        )
    for optimizer in optimizers:
        if isinstance(optimizer, OneBitAdam):
            raise UnsupportedOperationError(
                f"{type(optimizer).__name__} exchanges its momentum, and FSDP2 has sharded it",
                cure="Use AdamW with TopKEF, or DistributedDataParallel",
            )
