"""A small GPT on bytes of source code, with FSDP2 within nodes and compression between them.

    torchrun --nproc-per-node 4 examples/fsdp_bytelm.py --nodes 2 --compression TopKEF

`--compression` is any compressor of `horovod_topk.fsdp` with its settings, such as
"TopKEF(ratio=0.005)"; "none" is PyTorch's own HSDP. Ranks of one node have consecutive numbers.
"""

from __future__ import annotations

import argparse
import math
import time

import source_files
import torch
from bytelm import ByteGPT, bits, sequences
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR

import horovod_topk
from horovod_topk import fsdp
from horovod_topk.core.run.substitute import parse


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compression", default="TopKEF", help="default: %(default)s")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=4, help="sequences a rank and step")
    parser.add_argument("--lr", type=float, default=0.002)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(horovod_topk.seed(0))
    names = "between", "within"
    mesh = init_device_mesh("cpu", (args.nodes, ranks // args.nodes), mesh_dim_names=names)
    own = mesh if args.compression == "none" else mesh["within"]
    model = ByteGPT()
    for block in model.blocks:
        fully_shard(block, mesh=own)
    fully_shard(model, mesh=own)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    schedule = LambdaLR(optimizer, lambda step: 0.5 + 0.5 * math.cos(math.pi * step / args.steps))
    if args.compression != "none":
        asked = parse(args.compression)
        compressor = getattr(fsdp, asked.name)(**asked.settings)
        compressor.attach(model, optimizer, between=mesh["between"])

    rows = sequences(source_files.STANDARD_LIBRARY, ".py", "training")
    held_out = sequences(source_files.STANDARD_LIBRARY, ".py", "held-out")[:256]
    began = time.perf_counter()
    for step in range(args.steps):
        generator = torch.Generator().manual_seed(step * ranks + rank)
        batch = rows[torch.randint(len(rows), [args.batch_size], generator=generator)]
        optimizer.zero_grad()
        bits(model, batch).mean().backward()
        optimizer.step()
        schedule.step()
    seconds = (time.perf_counter() - began) / args.steps
    with torch.no_grad():  # every rank takes part in every forward
        scored = float(bits(model, held_out).double().mean())
    if rank == 0:
        horovod_topk.report(step=args.steps, bits_per_byte=scored)
        print(
            f"{args.compression}: {scored:.3f} bits a byte after {args.steps} steps, "
            f"{1000 * seconds:.1f} ms a step"
        )
        if args.compression != "none":
            print(fsdp.TopKEF.of(model).stats())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
