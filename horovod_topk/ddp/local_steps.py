"""Local steps over torch.distributed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch import distributed as dist
from torch.optim import Optimizer

from horovod_topk.ddp.compressor import Compressor
from horovod_topk.errors import ConfigError
from horovod_topk.torch_training import local_steps
from horovod_topk.torch_training.collective import GroupCollective


class LocalSteps(local_steps.LocalSteps):
    """`horovod_topk.torch_training.local_steps.LocalSteps` over torch.distributed."""

    compressors = Compressor

    def __init__(
        self,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, Tensor]],
        preset: str | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        **settings: Any,
    ) -> None:
        ranks: Any = dist.group.WORLD if group is None else group
        collective = None if ranks.size() == 1 else GroupCollective(ranks)
        if settings.get("offload") and collective is not None and not collective.on_host:
            raise ConfigError(
                "offload=True was given, and the process group exchanges arrays of GPUs alone",
                cure='Call init_process_group("cpu:gloo,cuda:nccl"), or pass a group of gloo',
            )
        super().__init__(optimizer, named_parameters, preset, collective=collective, **settings)
