"""Compression for Transformers' Trainer: `Trainer(..., callbacks=[TopKEFCallback()])`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from horovod_topk import checkpoint
from horovod_topk.errors import AdapterImportError
from horovod_topk.integrations.compression import Compression, load
from horovod_topk.integrations.waiting import before_first_forward

try:
    from transformers import TrainerCallback
except ImportError as error:
    cure = "pip install 'transformers[torch]'; plain PyTorch needs horovod_topk.ddp alone"
    raise AdapterImportError(f"Transformers cannot be imported: {error}", cure=cure) from error

MORE = ", or resume_from=folder if train() was given one outside output_dir"


class TopKEFCallback(TrainerCallback):  # type: ignore[misc]
    """Compresses a Trainer's gradients, and keeps residuals in its checkpoints.

    It attaches before the first forward of `Trainer.train()`: Trainer does not tell callbacks of
    the model that it has wrapped.

    Args:
        compressor: such as `TopKEF(ratio=0.01)` of `horovod_topk.ddp`; None: `TopKEF()`.
        between: FSDP2 alone: the name of the mesh dimension between nodes.
        resume_from: folder of the checkpoint that `train(resume_from_checkpoint=...)` is given, if
            it is not in `output_dir`, where Trainer has written it.
        strict: raise an error if that checkpoint has no residuals that fit. False: begin with
            zeros, and log a warning.
    """

    def __init__(
        self,
        compressor: Any = None,
        *,
        between: Any = None,
        resume_from: Any = None,
        strict: bool = True,
    ) -> None:
        self.compression = Compression(compressor, between)
        self._resume_from, self._strict = resume_from, strict

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Attach before the first forward, and load residuals if Trainer resumes."""
        optimizer = objects["optimizer"]
        folder = self._resume_from or _folder(args, state)
        resumes = state.global_step > 0

        def attach(model: nn.Module) -> None:
            self.compression.attach(model, [optimizer], getattr(optimizer, "scaler", None))
            if resumes:
                load(folder, self.compression.state, strict=self._strict, more=MORE)

        before_first_forward(objects["model"], attach)

    def on_save(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Write this rank's residuals into Trainer's checkpoint."""
        if not args.save_only_model:
            checkpoint.save(_folder(args, state), self.compression.state)


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
