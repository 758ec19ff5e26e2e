"""Some steps of training between two checkpoints; rank 0 writes down what all owe at both."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from horovod_topk import checkpoint
from horovod_topk.core.state.reshard import pending
from horovod_topk.ops.torch import TorchOps
from training import Setup, ordinary
from world import TopKEF, begin, hvd

before, after, exchange, report = sys.argv[1:]
begin()
setup = Setup()
task = setup.task()
compression = TopKEF(0.05, min_numel=0, exchange=exchange, values="int8")
optimizer = setup.distributed(task, compression)
state = TopKEF.of(optimizer)


def owed() -> dict[str, list[float]]:
    """What all ranks together would add to what is applied, by tensor."""
    states = hvd.allgather_object(state.state_dict(), name="states")
    total = pending(states, hvd.size(), "average", TorchOps())
    return {name: array.tolist() for name, array in total.items()}


if before != "-":
    checkpoint.load(before, state)
loaded = owed()
for step in range(4):
    ordinary(task, optimizer, step)
left = owed()
checkpoint.save(after, state)
if hvd.rank() == 0:
    Path(report).write_text(json.dumps({"ranks": hvd.size(), "loaded": loaded, "left": left}))
hvd.barrier()
