"""Two ranks train with the installed package; `make dist` runs it in a fresh environment.

    torchrun --nproc-per-node 2 scripts/try_wheel.py

It fails unless the compiled kernels are in use, the loss falls and all ranks have the same weights.
"""

from __future__ import annotations

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import horovod_topk
from horovod_topk.ddp import TopKEF
from horovod_topk.kernels import native

STEPS = 300


def main() -> None:
    """Train, then compare losses and weights."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    TopKEF().attach(model, optimizer)

    teacher = torch.randn(64, 10)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    losses = list[float]()
    for _ in range(STEPS):
        inputs = torch.randn(64, 64, generator=generator)
        loss = nn.functional.cross_entropy(model(inputs), (inputs @ teacher).argmax(dim=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    weights = torch.cat([each.detach().flatten() for each in model.parameters()])
    gathered = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, weights)
    first, last = sum(losses[:20]) / 20, sum(losses[-20:]) / 20
    assert native.find().library is not None, native.find().description
    assert last < first / 2, (first, last)
    assert all(each.equal(weights) for each in gathered), "ranks have different weights"
    if dist.get_rank() == 0:
        stats = TopKEF.of(model).stats()
        print(
            f"{horovod_topk.__version__} on torch {torch.__version__}, kernels "
            f"{native.find().description}: loss {first:.2f}, then {last:.2f}; the same weights on "
            f"all ranks; {stats.sent_bytes:,} bytes a step, dense {stats.dense_bytes:,}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
