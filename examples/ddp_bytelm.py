"""A small GPT on bytes of source code, with torch DistributedDataParallel and without Horovod.

    torchrun --nproc-per-node 2 examples/ddp_bytelm.py --compression TopKEF
    torchrun --nproc-per-node 2 --max-restarts 3 examples/ddp_bytelm.py --checkpoint /tmp/run
    torchrun --nproc-per-node 2 examples/ddp_bytelm.py --local-steps 30

`--compression` is any compressor of `horovod_topk.ddp` with its settings, such as
"PowerSGD(rank=2)"; "none" is DDP's own allreduce and "fp16" torch's hook of that name. With
`--checkpoint` every hundredth step is saved, and a job that is started again goes on from there,
also with another number of ranks. With `--local-steps` each rank trains alone for so many steps,
and then exchanges how far it has moved.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import source_files
import torch
from bytelm import ByteGPT, bits, sequences, spread_evenly
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import horovod_topk
from horovod_topk import checkpoint, ddp
from horovod_topk.core.run.substitute import parse

SAVED = 100  # steps from one checkpoint to the next


def compress(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, asked: str) -> None:
    """Attach the compressor that is asked for."""
    if asked == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif asked != "none":
        found = parse(asked)
        getattr(ddp, found.name)(**found.settings).attach(model, optimizer)


def local_steps(module: nn.Module, inner: torch.optim.Optimizer, args: Any) -> ddp.LocalSteps:
    """Exchange movements with the compressor that is asked for; "none" is a dense exchange."""
    found = parse("Dense" if args.compression in ("none", "fp16") else args.compression)
    compressor = getattr(ddp, found.name)(**found.settings)
    named, every = module.named_parameters(), args.local_steps
    return ddp.LocalSteps(inner, named, every=every, compression=compressor)


def save(folder: Path, step: int, parts: list[Any], compressed: Any) -> None:
    """Write a checkpoint that `load` takes only if every rank has written its part."""
    kept = folder / f"{step:06}"
    kept.mkdir(parents=True, exist_ok=True)
    checkpoint.save(kept, ddp.TopKEF.of(compressed))
    if dist.get_rank() == 0:
        torch.save([part.state_dict() for part in parts], kept / "training")
    dist.barrier()
    (kept / "whole").touch()


def load(folder: Path, parts: list[Any], compressed: Any) -> int:
    """Go on from the newest whole checkpoint; the number of steps that are done."""
    whole = sorted(file.parent for file in folder.glob("*/whole"))
    if not whole:
        return 0
    saved = torch.load(whole[-1] / "training", weights_only=True)
    for part, state in zip(parts, saved, strict=True):
        part.load_state_dict(state)
    checkpoint.load(whole[-1], ddp.TopKEF.of(compressed))
    return int(whole[-1].name)


@torch.no_grad()
def mean_bits(model: nn.Module, rows: Tensor) -> float:
    """Bits a byte of rows of text; each rank scores its share."""
    total = torch.zeros(2, dtype=torch.float64)
    for batch in rows[dist.get_rank() :: dist.get_world_size()].split(64):
        scores = bits(model, batch)
        total += torch.tensor([scores.double().sum(), scores.numel()])
    dist.all_reduce(total)
    return float(total[0] / total[1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compression", default="TopKEF", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=4, help="sequences a rank and step")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--checkpoint", type=Path, metavar="DIR")
    parser.add_argument("--local-steps", type=int, default=0, metavar="STEPS")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(horovod_topk.seed(0))
    module = ByteGPT()
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=args.lr, momentum=0.9)
    model: nn.Module = module
    if args.local_steps:
        compressed = optimizer = local_steps(module, optimizer, args)
    else:
        compressed = model = DistributedDataParallel(module)
        compress(model, optimizer, args.compression)
    schedule = LambdaLR(optimizer, lambda step: 0.5 + 0.5 * math.cos(math.pi * step / args.steps))

    parts, first = [module, optimizer, schedule], 0
    if args.checkpoint is not None:
        first = load(args.checkpoint, parts, compressed)
    rows = sequences(source_files.STANDARD_LIBRARY, ".py", "training")
    began = time.perf_counter()
    for step in range(first, args.steps):
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        batch = rows[torch.randint(len(rows), [args.batch_size], generator=generator)]
        optimizer.zero_grad()
        bits(model, batch).mean().backward()
        optimizer.step()
        schedule.step()
        if args.checkpoint is not None and (step + 1) % SAVED == 0:
            if args.local_steps:
                optimizer.synchronize()  # the weights of one rank are those of all
            save(args.checkpoint, step + 1, parts, compressed)
    if args.local_steps:
        optimizer.synchronize()
    seconds = (time.perf_counter() - began) / max(1, args.steps - first)
    scored = mean_bits(
        module, spread_evenly(sequences(source_files.STANDARD_LIBRARY, ".py", "held-out"), 256)
    )
    if dist.get_rank() == 0:
        horovod_topk.report(step=args.steps, bits_per_byte=scored)
        print(
            f"{args.compression}: {scored:.3f} bits a byte after {args.steps} steps, "
            f"{1000 * seconds:.1f} ms a step"
        )
        if args.local_steps or args.compression not in ("none", "fp16"):
            stats = ddp.TopKEF.of(compressed).stats()
            what = "an exchange" if args.local_steps else "a step"
            print(f"{stats.sent_bytes:,} bytes sent {what}, dense {stats.dense_bytes:,}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
