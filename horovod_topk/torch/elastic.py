"""Elastic Horovod: `hvd.elastic.TorchState(model=..., optimizer=..., compression=topk)`.

    from horovod_topk.torch import TopKEF
    from horovod_topk.torch.elastic import TorchState

    topk = TopKEF(ratio=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, ..., compression=topk)
    state = TorchState(model=model, optimizer=optimizer, compression=topk, epoch=0)

Give it the instance, not the class. Horovod's own `hvd.elastic.TorchState` takes it too; this one
also saves what a rank owes whose host is taken out after a warning, and commits when ranks meet.
What is kept, and what is not, says `horovod_topk.elastic`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import horovod.torch.elastic as hvd_elastic
from horovod.torch.elastic.state import StateHandler, get_handler_registry

from horovod_topk.elastic import Manager, free_name
from horovod_topk.elastic.leaving import HandsOver
from horovod_topk.errors import ConfigError
from horovod_topk.torch.compressor import TopKEF


class ResidualHandler(StateHandler):  # type: ignore[misc]  # Horovod has no annotations
    """Commits and restores locally: what ranks owe is not what rank 0 owes."""

    def __init__(self, value: TopKEF) -> None:
        super().__init__(value)
        self.manager = value.keep(free_name(value.config.name))
        self.save()

    def save(self) -> None:
        """Commit."""
        self.manager.save()

    def restore(self) -> None:
        """Go back to the last commit."""
        self.manager.restore()

    def sync(self) -> None:
        """Meet the other ranks, after some have come or gone."""
        self.manager.settle()

    def set_value(self, value: TopKEF) -> None:
        """Refuse another compressor: its optimizer's residuals would be lost.

        Raises:
            ConfigError: it is another.
        """
        if value is not self.value:
            raise ConfigError(
                "another TopKEF was assigned to an elastic state",
                cure="Make a new state for a new optimizer",
            )


class TorchState(HandsOver, hvd_elastic.TorchState):  # type: ignore[misc]
    """Horovod's, whose ranks share out what they owe before some leave, and commit when they meet.

    Args: see `hvd.elastic.TorchState`.

    Raises:
        ConfigError: the class TopKEF was given, which no optimizer stands behind.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        for name, value in kwargs.items():
            if isinstance(value, type) and issubclass(value, TopKEF):
                raise ConfigError(
                    f"{name}=TopKEF is the class, whose residuals nobody could find",
                    cure="Make one, topk = TopKEF(), and give it to optimizer and state",
                )
        super().__init__(*args, **kwargs)

    def sync(self) -> None:
        """Meet the other ranks, and commit: who has just joined has nothing else to go back to.

        Without that, Horovod would go on with a joiner's untrained model if all others were lost
        before its first commit.
        """
        super().sync()
        self.save()

    def _managers(self) -> Iterator[Manager]:
        handlers = self._handlers.values()
        return (each.manager for each in handlers if isinstance(each, ResidualHandler))


def install() -> None:
    """Have Horovod's elastic states take a TopKEF."""
    registry = get_handler_registry()
    if (TopKEF, ResidualHandler) not in registry:
        registry.append((TopKEF, ResidualHandler))
