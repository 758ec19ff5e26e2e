"""Sparse gradients: left to Horovod's own allgather where nothing of theirs would be lost."""

from __future__ import annotations

from torch import Tensor

from horovod_topk.core.compressor import Compressor
from horovod_topk.errors import ConfigError, ShapeChangedError


def check_may_leave(name: str, compressor: Compressor[Tensor]) -> None:
    """Refuse a sparse gradient where Horovod's path would do less to it than was asked for.

    Raises:
        ConfigError: settings change gradients before they are exchanged.
        ShapeChangedError: its residual is not zero.
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
    """The error where a setting would silently not hold for a sparse gradient."""
    return ConfigError(
        f"its gradient is sparse, and {setting} is for gradients that are compressed: Horovod "
        "would exchange this one as it is",
        tensor=tensor,
        cure="Pass sparse_as_dense=True to hvd.DistributedOptimizer, or sparse=False to the layer",
    )
