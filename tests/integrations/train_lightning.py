"""Trains a small model with Lightning: REPORT FOLDER RESUME [more words]."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from horovod_topk import ddp, fsdp
from horovod_topk.integrations.lightning import TopKEFCallback
from small import Net, end, report, rows

file, folder, resume = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
words = {*sys.argv[4:]}


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: Any, index: int) -> Any:
        return self.net(**batch)["loss"]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Sharded(Module):
    """Two nodes of as many ranks as there are for each."""

    def configure_model(self) -> None:
        sizes = 2, torch.distributed.get_world_size() // 2
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
        fully_shard(self.net.layers, mesh=mesh["shard"])
        fully_shard(self.net, mesh=mesh["shard"])


ranks = int(os.environ.get("WORLD_SIZE", "1"))
strategy: Any = "auto" if "alone" in words else DDPStrategy()
if "sharded" in words:
    strategy = ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
between = "replicate" if "sharded" in words else None
compressor = (fsdp if between else ddp).TopKEF(min_numel=0)
callback = TopKEFCallback(compressor, between=between)
saving = ModelCheckpoint(folder, filename="at-{step}", every_n_epochs=1, save_top_k=-1)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=ranks,
    strategy=strategy,
    max_epochs=2,
    accumulate_grad_batches=1 if "sharded" in words else 2,
    callbacks=[saving] if "dense" in words else [callback, saving],
    enable_progress_bar=False,
    logger=False,
)
module = Sharded() if "sharded" in words else Module()
trainer.fit(module, DataLoader(rows(), batch_size=4), ckpt_path=None if resume == "-" else resume)
if "dense" not in words:
    for name, p in [*module.named_parameters()]:
        if isinstance(p, DTensor):
            whole = torch.nn.Parameter(p.full_tensor().detach())
            owner, _, last = name.rpartition(".")
            setattr(module.get_submodule(owner), last, whole)
    report(file, module, callback.compression.state)
end()
