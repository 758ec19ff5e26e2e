"""Some steps of training between two checkpoints; rank 0 writes down what all owe at both."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import horovod.torch as hvd
import torch

from horovod_topk import checkpoint
from horovod_topk.core.state.reshard import pending
from horovod_topk.ops.torch import TorchOps
from horovod_topk.torch import TopKEF

before, after, exchange, report = sys.argv[1:]
hvd.init()
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(70, 60), torch.nn.Linear(60, 3))
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01),
    named_parameters=model.named_parameters(),
    compression=TopKEF(0.05, min_numel=0, exchange=exchange, values="int8"),
)
state = TopKEF.of(optimizer)


def owed() -> dict[str, list[float]]:
    """What all ranks together would add to what is applied, by tensor."""
    states = hvd.allgather_object(state.state_dict(), name="states")
    total = pending(states, hvd.size(), "average", TorchOps())
    return {name: array.tolist() for name, array in total.items()}


if before != "-":
    checkpoint.load(before, state)
loaded = owed()
torch.manual_seed(hvd.rank())
for _ in range(4):
    optimizer.zero_grad()
    model(torch.randn(8, 70)).square().sum().backward()
    optimizer.step()
left = owed()
checkpoint.save(after, state)
if hvd.rank() == 0:
    Path(report).write_text(json.dumps({"ranks": hvd.size(), "loaded": loaded, "left": left}))
