"""A small GPT on the bytes of text files, by default the sources of Python's standard library.

    horovodrun -np 2 --gloo python examples/pytorch_bytelm.py --compression topk
    horovodrun -np 2 --gloo python examples/pytorch_bytelm.py --compression topk --local-steps 30

It reports bits per byte on held-out files, a fifth of all. Another fifth is kept for choosing
settings. `--data DIRECTORY --suffix .txt` trains on files of your own.
"""

from __future__ import annotations

from pathlib import Path

import harness
import horovod.torch as hvd
import source_files
import torch
import torch_harness
from bytelm import ByteGPT, bits, in_rows, sequences, spread_evenly
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

__all__ = ["ByteGPT", "bits", "in_rows", "sequences", "spread_evenly"]


def main() -> None:
    parser = harness.arguments(__doc__, steps=1000, batch_size=4, lr=1e-3, optimizer="adamw")
    harness.add_evaluation(parser, every=100)
    parser.add_argument(
        "--data",
        type=Path,
        default=source_files.STANDARD_LIBRARY,
        metavar="DIR",
        help="folder with the text files (default: Python's standard library)",
    )
    parser.add_argument(
        "--suffix", default=".py", help="ending of the files to read (default: .py)"
    )
    parser.add_argument(
        "--local-steps",
        type=harness.positive,
        metavar="STEPS",
        help="train each rank alone for so many steps, then exchange how far it has moved",
    )
    args = harness.parse(parser)

    harness.check_launcher(hvd)
    hvd.init(process_sets=harness.process_sets(args))
    torch.set_num_threads(harness.threads(hvd.local_size()))
    torch.manual_seed(args.seed)

    model = ByteGPT()
    optimizer = torch_harness.optimizer(args, model)
    if args.local_steps:
        optimizer = torch_harness.local_steps(args, model, optimizer)
    else:
        optimizer = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=model.named_parameters(),
            compression=torch_harness.compression(args),
        )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    schedule = LambdaLR(optimizer, harness.warmup_cosine(args.steps))

    def scores(text: Tensor) -> Tensor:
        return bits(model, text).mean(dim=1)

    unseen = spread_evenly(sequences(args.data, args.suffix, args.evaluate_on))
    training = sequences(args.data, args.suffix, "training")

    run = torch_harness.Run(args, model, optimizer)
    batches = torch_harness.batches(training, batch_size=args.batch_size, seed=args.seed)
    for (text,) in run.steps(batches):
        optimizer.zero_grad()
        loss = bits(model, text).mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        if run.stepped(loss.item()):
            scored = torch_harness.mean_over_rows(
                lambda text: bits(model, text).mean(dim=1), unseen
            )
            run.evaluated(bits_per_byte=scored)
    run.finish()
    if args.local_steps:
        optimizer.synchronize()  # all ranks have equal weights


if __name__ == "__main__":
    main()
