"""Sparse gradients: exchanged by Horovod's allgather if no setting or residual forbids it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from horovod_topk.core.run.compressor import Compressor
from horovod_topk.errors import ConfigError, ShapeChangedError


def check_may_leave(name: str, compressor: Compressor[Tensor]) -> None:
    """Refuse a sparse gradient to which a setting would not apply, or with a residual.

    Raises:
        ConfigError: a setting changes gradients before they are exchanged.
        ShapeChangedError: the gradient's residual is not zero.
    """
    config = compressor.plan.config
    if config.momentum:
        raise refused(f"momentum={config.momentum}", name)
    if config.clip_norm is not None:
        raise refused(f"clip_norm={config.clip_norm}", name)
    norm = compressor.norm_of(name)
    if norm > 0.0:
        raise ShapeChangedError(
            f"its gradient became sparse, and a residual of norm {norm:.3g} would be lost",
            tensor=name,
            cure="Pass sparse_as_dense=True to hvd.DistributedOptimizer",
        )


def refused(setting: str, tensor: str) -> ConfigError:
    """The error for a setting that would have no effect on a sparse gradient."""
    return ConfigError(
        f"its gradient is sparse, and {setting} is for gradients that are compressed: Horovod "
        "would exchange this one as it is",
        tensor=tensor,
        cure="Pass sparse_as_dense=True to hvd.DistributedOptimizer, or sparse=False to the layer",
    )


def values_alone(optimizer: Any, clip_norm: float) -> list[Tensor]:
    """Dense gradients and the values of sparse ones, to be clipped where nothing is exchanged.

    Sparse gradients count like their dense copies with `sparse_as_dense`.

    Raises:
        ConfigError: a gradient is sparse, and `sparse_as_dense` is off.
    """
    found = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    for p in found:
        if p.grad.is_sparse and not optimizer.sparse_as_dense:
            name = optimizer._parameter_names.get(p, f"of shape {list(p.shape)}")
            raise refused(f"clip_norm={clip_norm}", name)
    for p in found:
        if p.grad.is_sparse:
            p.grad = p.grad.coalesce()  # add up duplicate indices before the norm
    return [p.grad._values() if p.grad.is_sparse else p.grad for p in found]
