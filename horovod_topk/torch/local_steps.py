"""Local steps over Horovod."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import horovod.torch as hvd
from torch import Tensor
from torch.optim import Optimizer

from horovod_topk.core.exchange.membership import elastic
from horovod_topk.errors import ConfigError
from horovod_topk.torch.collective import HorovodCollective
from horovod_topk.torch.compressor import Compressor
from horovod_topk.torch_training import local_steps


class LocalSteps(local_steps.LocalSteps):
    """`horovod_topk.torch_training.local_steps.LocalSteps` over Horovod.

    process_set: Horovod's process set of the ranks that exchange.
    """

    compressors = Compressor

    def __init__(
        self,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, Tensor]],
        preset: str | None = None,
        *,
        process_set: Any = hvd.global_process_set,
        **settings: Any,
    ) -> None:
        if not process_set.included():
            raise ConfigError(
                "this rank is not in the process set of LocalSteps",
                cure="Make LocalSteps on the ranks of the process set alone",
            )
        is_alone = process_set.size() == 1 and not elastic()
        collective = None if is_alone else HorovodCollective(process_set)
        super().__init__(optimizer, named_parameters, preset, collective=collective, **settings)
        self._topkef._process_set = process_set
