"""Trains a small model with Transformers' Trainer: REPORT FOLDER RESUME [more words]."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainingArguments

from horovod_topk.ddp import TopKEF
from horovod_topk.integrations.transformers import TopKEFCallback
from small import Net, end, report, rows

file, folder, resume = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
callback = TopKEFCallback(TopKEF(min_numel=0))
arguments = TrainingArguments(
    output_dir=folder,
    max_steps=8,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=0.01,
    lr_scheduler_type="constant",
    save_steps=4,
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
    torch_compile="compiled" in sys.argv,
    torch_compile_backend="eager" if "compiled" in sys.argv else None,
)
callbacks: list[Any] = [] if "dense" in sys.argv else [callback]
trainer = Trainer(Net(), arguments, train_dataset=rows(), callbacks=callbacks)
trainer.train(resume_from_checkpoint=None if resume == "-" else resume)
if callbacks:
    report(file, trainer.model, callback.compression.state)
end()
