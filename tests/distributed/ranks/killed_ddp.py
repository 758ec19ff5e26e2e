"""Training that goes on from the last checkpoint when torchrun starts all ranks again.

In the first life of the job the last rank kills itself, if it is told after which step.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from horovod_topk import checkpoint
from horovod_topk.ddp import TopKEF

STEPS = 8
folder, dies_after = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = DistributedDataParallel(torch.nn.Linear(40, 30))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
TopKEF(0.05, min_numel=0, exchange="sharded").attach(model, optimizer)
state = TopKEF.of(model)

done = sorted(int(file.parent.name) for file in folder.glob("*/whole"))
if done:
    kept = folder / str(done[-1])
    module, rest = torch.load(kept / "model", weights_only=True)
    model.module.load_state_dict(module)
    optimizer.load_state_dict(rest)
    checkpoint.load(kept, state)
first = done[-1] if done else 0
for step in range(first, STEPS):
    generator = torch.Generator().manual_seed(100 * step + rank)
    optimizer.zero_grad()
    model(torch.randn(8, 40, generator=generator)).square().sum().backward()
    optimizer.step()
    kept = folder / str(step + 1)
    checkpoint.save(kept, state)
    if rank == 0:
        torch.save([model.module.state_dict(), optimizer.state_dict()], kept / "model")
    dist.barrier()
    if rank == 0:
        (kept / "whole").touch()
    is_first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if is_first_life and step + 1 == dies_after and rank == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
if rank == 0:
    weights = {name: p.tolist() for name, p in model.module.state_dict().items()}
    torch.save({"weights": weights, "resumed": first}, folder / "end")
dist.barrier()
dist.destroy_process_group()
