"""State of elastic jobs in PyTorch: model, optimizer and residuals.

    from horovod_topk.torch import TopKEF
    from horovod_topk.torch.elastic import TorchState

    topk = TopKEF(ratio=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, ..., compression=topk)
    state = TorchState(
        model=model, optimizer=optimizer, compression=topk, commit_dir="/shared/run", epoch=0
    )

Pass the TopKEF instance, not the class. Horovod's own `hvd.elastic.TorchState` accepts it too. The
`TorchState` of this module also keeps the residuals of a rank whose host is removed after a
warning, and commits whenever ranks have changed. `horovod_topk.elastic` says which residuals are
kept in which case.

Importing this module adds `TopKEF` to Horovod's registry of handlers for elastic states.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import horovod.torch.elastic as hvd_elastic
from horovod.torch.elastic.state import StateHandler, get_handler_registry
from torch.optim import Optimizer

from horovod_topk.elastic import Manager, free_name
from horovod_topk.elastic.leaving import HandsOver
from horovod_topk.errors import ConfigError
from horovod_topk.torch.compressor import Compressor


class ResidualHandler(StateHandler):  # type: ignore[misc]  # Horovod has no annotations
    """Commits and restores a rank's own residuals; they are not broadcast from rank 0."""

    def __init__(self, value: Compressor) -> None:
        super().__init__(value)
        self.manager = value.keep(free_name(value.config.name))
        self.save()

    def save(self) -> None:
        """Save a copy of the residuals, for `restore`."""
        self.manager.save()

    def restore(self) -> None:
        """Set the residuals to those of the last commit."""
        self.manager.restore()

    def sync(self) -> None:
        """Rescale residuals together with all ranks, after some have joined or left."""
        self.manager.reconcile()

    def set_value(self, value: Compressor) -> None:
        """Refuse another compressor: its optimizer's residuals would be lost."""
        if value is not self.value:
            raise ConfigError(
                "another TopKEF was assigned to an elastic state",
                cure="Make a new state for a new optimizer",
            )


class TorchState(HandsOver, hvd_elastic.TorchState):  # type: ignore[misc]
    """An elastic state of model, optimizer and residuals, for `hvd.elastic.run`.

    As `hvd.elastic.TorchState`. In addition, all ranks average their residuals before some leave
    after a warning, and every rank commits when ranks have changed.

    Args:
        args: see `hvd.elastic.TorchState`.
        commit_dir: a folder that all ranks can read. Each commit writes this rank's residuals
            there, so that another rank can take them over if this one is lost. None: no files.
        kwargs: see `hvd.elastic.TorchState`; among them the `TopKEF` instance, under any name.

    Raises:
        ConfigError: the class TopKEF was passed instead of an instance; or a learning-rate
            scheduler, of which `sync()` would give all ranks but the first a copy.
    """

    def __init__(
        self, *args: Any, commit_dir: str | os.PathLike[str] | None = None, **kwargs: Any
    ) -> None:
        for name, value in kwargs.items():
            if isinstance(value, type) and issubclass(value, Compressor):
                raise ConfigError(
                    f"{name}=TopKEF is the class, whose residuals nobody could find",
                    cure="Make one, topk = TopKEF(), and give it to optimizer and state",
                )
            if hasattr(value, "step") and isinstance(getattr(value, "optimizer", None), Optimizer):
                raise ConfigError(
                    f"{name}= is a {type(value).__name__}, and Horovod's sync() replaces it by a "
                    "copy on all ranks but the first, which drives a copy of the optimizer",
                    cure="Keep it outside of the state, and its state_dict() inside, as "
                    "docs/elastic.md shows",
                )
        super().__init__(*args, **kwargs)
        for manager in self._managers():
            manager.store_in(commit_dir)

    def sync(self) -> None:
        """Take rank 0's model and attributes, rescale residuals together, and commit.

        Without this commit, Horovod would go on with the untrained model of a rank that has joined,
        if all other ranks failed before the next commit.
        """
        super().sync()
        self.save()

    def _managers(self) -> Iterator[Manager]:
        handlers = self._handlers.values()
        return (each.manager for each in handlers if isinstance(each, ResidualHandler))


def install() -> None:
    """Register the handler of TopKEF for Horovod's elastic states."""
    registry = get_handler_registry()
    if (Compressor, ResidualHandler) not in registry:
        registry.append((Compressor, ResidualHandler))
