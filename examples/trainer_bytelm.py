"""A small GPT on bytes of source code, trained by Transformers' Trainer with compression.

    pip install 'transformers[torch]'
    torchrun --nproc-per-node 2 examples/trainer_bytelm.py --compression TopKEF

`--compression` is any compressor of `horovod_topk.ddp` with its settings, such as
"TopKEF(ratio=0.005)"; "none" is Trainer's own DDP.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from typing import Any

import source_files
import torch
from bytelm import CONTEXT, sequences, spread_evenly
from torch import Tensor
from torch import distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import horovod_topk
from horovod_topk import ddp
from horovod_topk.core.run.substitute import parse
from horovod_topk.integrations.transformers import TopKEFCallback


def examples(rows: Tensor) -> list[dict[str, Tensor]]:
    """Rows of text as Trainer takes them; the model predicts each byte from those before it."""
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compression", default="TopKEF", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=4, help="sequences a rank and step")
    parser.add_argument("--lr", type=float, default=0.001)
    args = parser.parse_args()

    torch.set_num_threads(1)
    seed = horovod_topk.seed(0)
    torch.manual_seed(seed)
    size = {"n_positions": CONTEXT + 1, "n_embd": 96, "n_layer": 2, "n_head": 4}
    config = GPT2Config(vocab_size=256, bos_token_id=None, eos_token_id=None, **size)
    callbacks: list[Any] = []
    if args.compression != "none":
        asked = parse(args.compression)
        callbacks = [TopKEFCallback(getattr(ddp, asked.name)(**asked.settings))]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=args.steps,
            per_device_train_batch_size=args.batch_size,
            learning_rate=args.lr,
            lr_scheduler_type="cosine",
            seed=seed,
            ddp_find_unused_parameters=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        library = source_files.STANDARD_LIBRARY
        trainer = Trainer(
            GPT2LMHeadModel(config),
            arguments,
            train_dataset=examples(sequences(library, ".py", "training")),
            eval_dataset=examples(spread_evenly(sequences(library, ".py", "held-out"), 256)),
            callbacks=callbacks,
        )
        began = time.perf_counter()
        trainer.train()
        seconds = (time.perf_counter() - began) / args.steps
        scored = trainer.evaluate()["eval_loss"] / math.log(2)
    if trainer.is_world_process_zero():
        horovod_topk.report(step=args.steps, bits_per_byte=scored)
        print(
            f"{args.compression}: {scored:.3f} bits a byte after {args.steps} steps, "
            f"{1000 * seconds:.1f} ms a step"
        )
        for callback in callbacks:
            print(callback.compression.state.stats())
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
