"""Compression for Lightning: `Trainer(..., strategy="ddp", callbacks=[TopKEFCallback()])`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from horovod_topk.checkpoint import save
from horovod_topk.errors import AdapterImportError
from horovod_topk.integrations.compression import Compression, load

try:
    from lightning.pytorch import Callback
except ImportError as error:
    cure = "pip install lightning; plain PyTorch needs horovod_topk.ddp alone"
    raise AdapterImportError(f"Lightning cannot be imported: {error}", cure=cure) from error

RESIDUALS = "horovod_topk"  # the key in Lightning's checkpoints: name of a file -> its bytes


class TopKEFCallback(Callback):  # type: ignore[misc]
    """Compresses the gradients of `Trainer.fit`, and keeps residuals in its checkpoints.

    Args:
        compressor: such as `TopKEF(ratio=0.01)` of `horovod_topk.ddp`; None: `TopKEF()`.
        between: FSDP2 alone: the name of the mesh dimension between nodes.
        strict: raise an error if the checkpoint that is resumed has no residuals that fit. False:
            begin with zeros, and log a warning.

    Example:
        >>> trainer = Trainer(strategy="ddp", callbacks=[TopKEFCallback()])
    """

    def __init__(self, compressor: Any = None, *, between: Any = None, strict: bool = True) -> None:
        self.compression = Compression(compressor, between)
        self._strict = strict
        self._loaded: dict[str, Any] | None = None  # of the checkpoint that is resumed

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach to the model that the strategy has wrapped, and load residuals."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.compression.attach(trainer.strategy.model, trainer.optimizers, scaler)
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            with tempfile.TemporaryDirectory() as folder:
                for name, contents in loaded.items():
                    (Path(folder) / name).write_bytes(contents.numpy().tobytes())
                load(folder, self.compression.state, strict=self._strict)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """Put the residuals of all ranks into the checkpoint, which rank 0 writes."""
        with tempfile.TemporaryDirectory() as folder:
            path = save(folder, self.compression.state)
            if path is None:
                return
            own = path.name, torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
        every: list[Any] = [None] * dist.get_world_size() if dist.get_rank() == 0 else []
        dist.gather_object(own, every or None)
        checkpoint[RESIDUALS] = dict(every)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """Keep the residuals of a checkpoint until training starts."""
        self._loaded = checkpoint.get(RESIDUALS, {})
