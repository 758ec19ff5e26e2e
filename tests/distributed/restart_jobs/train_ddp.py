"""As train.py, with DistributedDataParallel under torchrun: steps between two checkpoints."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from horovod_topk import checkpoint
from horovod_topk.core.state.reshard import pending
from horovod_topk.ddp import TopKEF
from horovod_topk.ops.torch import TorchOps

before, after, exchange, report = sys.argv[1:]
dist.init_process_group("gloo")
torch.manual_seed(1)
module = torch.nn.Sequential(torch.nn.Linear(70, 60), torch.nn.Linear(60, 3))
model = DistributedDataParallel(module)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
TopKEF(0.05, min_numel=0, exchange=exchange, values="int8").attach(model, optimizer)
state = TopKEF.of(model)


def owed() -> dict[str, list[float]]:
    """What all ranks together would add to what is applied, by tensor."""
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, state.state_dict())
    total = pending(states, dist.get_world_size(), "average", TorchOps())
    return {name: array.tolist() for name, array in total.items()}


if before != "-":
    checkpoint.load(before, state)
loaded = owed()
torch.manual_seed(dist.get_rank())
for _ in range(4):
    optimizer.zero_grad()
    model(torch.randn(8, 70)).square().sum().backward()
    optimizer.step()
left = owed()
checkpoint.save(after, state)
if dist.get_rank() == 0:
    found = {"ranks": dist.get_world_size(), "loaded": loaded, "left": left}
    Path(report).write_text(json.dumps(found))
dist.barrier()
dist.destroy_process_group()
