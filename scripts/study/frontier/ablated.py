"""The compressor with a part of it left out, to see what the part is good for."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from horovod_topk.methods.topk import TopK
from study.frontier.exchanges import Compressed, Gradients

FEEDBACK, MASKING, OWNERS = "error feedback", "masking", "the owners' residual"


class Ablated(Compressed):
    """`Compressed` without error feedback, without masking, or without the owners' residual.

    Args:
        model, ranks, config: as there.
        without: the part.
    """

    def __init__(self, model: nn.Module, ranks: int, config: TopK, without: str) -> None:
        super().__init__(model, ranks, config)
        self._forget: list[Callable[[], None]] = []
        for each in self.compressors:
            if without == MASKING and each.momentum is not None:
                each.momentum.mask = lambda *_: None  # type: ignore[method-assign]
            if without == FEEDBACK:
                self._forget.append(each.registry.reset)
            if without in (FEEDBACK, OWNERS) and each.owned is not None:
                self._forget.append(each.owned.reset)

    def mean(self, gradients: list[Gradients]) -> Gradients:
        """`Exchange.mean`."""
        exchanged = super().mean(gradients)
        for forget in self._forget:
            forget()
        return exchanged
