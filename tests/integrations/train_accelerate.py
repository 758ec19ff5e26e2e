"""Trains a small model with Accelerate: REPORT FOLDER RESUME [more words]."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DDPCommunicationHookType
from torch.utils.data import DataLoader

from horovod_topk.ddp import TopKEF
from horovod_topk.integrations.accelerate import TopKEFKwargs
from small import Net, end, report, rows

file, folder, resume = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
words = {*sys.argv[4:]}
settings: dict[str, Any] = {"find_unused_parameters": True}
if "hooked" in words:
    settings["comm_hook"] = DDPCommunicationHookType.FP16
handler = TopKEFKwargs(TopKEF(min_numel=0), **settings)
accelerator = Accelerator(
    cpu=True,
    gradient_accumulation_steps=2,
    kwargs_handlers=[] if "dense" in words else [handler],
    dynamo_backend="eager" if "compiled" in words else None,
)
model: Any = Net()
optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
loader: Any = DataLoader(rows(), batch_size=4)
if "unwrapped" in words:
    model = accelerator.prepare_model(model, evaluation_mode=True)
    optimizer, loader = accelerator.prepare(optimizer, loader)
elif "forgotten" in words:
    model, loader = accelerator.prepare(model, loader)
else:
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
batches = [batch for _ in range(2) for batch in loader][: 2 * 8]
begin = 0 if resume == "-" else 2 * 4
if begin:
    accelerator.load_state(resume)
for i, batch in enumerate(batches[begin:], begin + 1):
    with accelerator.accumulate(model):
        accelerator.backward(model(**batch)["loss"])
        accelerator.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()
        optimizer.zero_grad()
    if i == 2 * 4:
        accelerator.save_state(folder)
if "dense" not in words:
    report(file, accelerator.unwrap_model(model), next(iter(handler.compressions.values())).state)
end()
