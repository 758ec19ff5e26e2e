"""Attaching a compressor to a model that a training library has wrapped.

The libraries' modules share this one. It says in one line of the log what is compressed, or why
nothing is. A model that was not wrapped, in a job of several ranks, is an error: it would train
dense, or each rank for itself.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from horovod_topk import checkpoint, ddp, reporting
from horovod_topk.core.exchange.membership import ALONE
from horovod_topk.core.run.attached import Attached
from horovod_topk.errors import CheckpointError, ConfigError
from horovod_topk.torch_training.optimizer_settings import hand_over
from horovod_topk.torch_training.preprocessing import clip_alone

log = logging.getLogger("horovod_topk")


class Compression:
    """A compressor, and the state of the model that it was attached to last.

    Args:
        compressor: a compressor of `horovod_topk.ddp` or `horovod_topk.fsdp`; None: `TopKEF()` of
            the one that fits the model.
        between: FSDP2 alone: the dimension of the device mesh between nodes, such as "replicate",
            or what `horovod_topk.fsdp` takes as `between=`.
    """

    def __init__(self, compressor: Any = None, between: Any = None) -> None:
        self._compressor, self._between = compressor, between
        self._attached: list[Any] = []  # the model and its optimizers
        self.state: Any = None

    def attach(self, model: Any, optimizers: Sequence[Any], scaler: Any = None) -> None:
        """Attach the compressor, unless it is attached to this model and these optimizers.

        Args:
            model: what the library calls in training; None: there is one process.
            optimizers: the library's; those that have no parameter of the model are left out.
            scaler: the `GradScaler` of the library, if it has one.
        """
        optimizers = [inner(each) for each in optimizers]
        if model is not None:
            own = {*model.parameters()}
            optimizers = [
                o for o in optimizers if any(own & {*g["params"]} for g in o.param_groups)
            ]
            model = distributed(model)
        if [*map(id, [model, *optimizers])] == [*map(id, self._attached)]:
            return
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            self._leave_alone(optimizers)
        else:
            self._attach(model, optimizers, scaler)
        self._attached = [model, *optimizers]

    def has(self, optimizer: Any) -> bool:
        """Whether the compressor is attached to an optimizer, or was left out for one process."""
        return any(each is optimizer for each in self._attached)

    def _leave_alone(self, optimizers: Sequence[Any]) -> None:
        """Apply the compressor's momentum and clipping alone: there is one process."""
        self.state = Attached[Any](None, "average", "a model of one process", ALONE)
        self.state.framework = "torch"
        config = (self._compressor or ddp.TopKEF()).config
        for optimizer in optimizers:
            hand_over(optimizer, config.momentum, nesterov=config.nesterov)
            if config.clip_norm is not None:
                clip_alone(optimizer, config.clip_norm)
        _say("TopKEF compresses nothing: %s", ALONE)

    def _attach(self, model: Any, optimizers: Sequence[Any], scaler: Any) -> None:
        compressor, arguments = self._compressor, [model, optimizers]
        if not optimizers:
            raise ConfigError(
                f"the library has no optimizer of this {type(model).__name__}'s parameters",
                cure="Have it prepare the optimizer before the model's first forward",
            )
        if isinstance(model, DistributedDataParallel):
            compressor = compressor or ddp.TopKEF()
        elif is_fsdp2(model):
            from horovod_topk import fsdp  # takes a second

            if self._between is None or getattr(compressor, "adapter", "fsdp") != "fsdp":
                raise ConfigError(
                    "FSDP2 has sharded the model",
                    cure="Pass between='replicate', the name of the mesh dimension between nodes, "
                    "and no compressor but those of horovod_topk.fsdp",
                )
            compressor = compressor or fsdp.TopKEF()
            arguments.append(self._mesh(model))
        else:
            raise ConfigError(
                f"the model that is trained is a {type(model).__name__}, and neither "
                "DistributedDataParallel nor FSDP2 has wrapped it",
                cure="Choose DDP as the library's strategy, or leave compression out",
            )
        if scaler is not None and compressor.grad_scaler is None:
            compressor.grad_scaler = scaler
        compressor.attach(*arguments)
        self.state = compressor.of(model)
        stats = self.state.stats()
        if stats.active:
            _say(
                "%r compresses %s elements of a %s's gradients among %d ranks: at its ratio a rank "
                "sends %s bytes a step, dense %s",
                compressor,
                f"{stats.elements:,}",
                type(getattr(model, "module", model)).__name__.removeprefix("FSDP"),
                stats.ranks,
                f"{stats.sent_bytes:,}",
                f"{stats.dense_bytes:,}",
            )

    def _mesh(self, model: nn.Module) -> Any:
        """The mesh dimension between nodes, of the mesh of which the model's is a dimension."""
        if not isinstance(self._between, str):
            return self._between
        meshes = (getattr(p, "device_mesh", None) for p in model.parameters())
        root: Any = next(mesh for mesh in meshes if mesh is not None)._get_root_mesh()
        if self._between not in (root.mesh_dim_names or ()):
            raise ConfigError(
                f"between={self._between!r} is no dimension of the mesh, which has "
                f"{root.mesh_dim_names}",
                cure="Shard the model over a dimension of the mesh of all ranks, and pass the name "
                "of the other one",
            )
        return root[self._between]


def distributed(model: nn.Module) -> nn.Module:
    """Return the outermost module that DDP or FSDP2 has wrapped, or else the model itself."""
    every = (m for m in model.modules() if isinstance(m, DistributedDataParallel) or is_fsdp2(m))
    return next(every, model)


def is_fsdp2(model: nn.Module) -> bool:
    """Whether `fully_shard` was called with a module; to import its class takes a second."""
    return hasattr(model, "set_requires_gradient_sync")


def inner(optimizer: Any) -> Any:
    """Return the optimizer of PyTorch in what Accelerate or Lightning has made of it."""
    for name in ("optimizer", "_optimizer"):
        if type(optimizer).__name__ in ("AcceleratedOptimizer", "LightningOptimizer"):
            optimizer = getattr(optimizer, name, optimizer)
    return optimizer


def load(
    folder: str | os.PathLike[str],
    state: Any,
    *,
    name: str = "topkef",
    strict: bool,
    more: str = "",
) -> None:
    """Load residuals from a library's checkpoint; see `horovod_topk.checkpoint.load`.

    Args:
        name, strict: as for `checkpoint.load`.
        more: what else a user may do about a checkpoint without residuals.
    """
    if strict and state.active and not any(Path(folder).glob(f"{name}[.-]*.safetensors")):
        problem = f"training resumes with compression, and {folder} has no residuals"
        raise CheckpointError(problem, cure=f"Pass strict=False to begin with zeros{more}")
    checkpoint.load(folder, state, name=name, strict=strict)


def _say(text: str, *values: object) -> None:
    """Log a line on rank 0, as a warning: Python shows no other level by default."""
    if reporting.launched_rank() in (None, 0):
        log.warning(text, *values)
