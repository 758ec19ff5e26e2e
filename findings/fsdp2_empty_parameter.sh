#!/usr/bin/env bash
# FSDP2 cannot train a module that has a parameter without elements.
#
# PyTorch 2.13.0, on a CPU, one process with Gloo, no other package. Such a parameter is what is
# left of a bank, or of an adapter, of size zero. DDP trains the same module, and fully_shard()
# accepts it without a word. Its backward raises a RuntimeError where FSDP2 copies gradients together
# for the reduce-scatter. It is so with one rank, too.
#
# Output seen on 2026-11-29:
#     DDP, no rows     trains
#     FSDP2, one row   trains
#     FSDP2, no rows   RuntimeError: _chunk_cat expects non-empty tensor
#
# Exit status 0: it is still so.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$folder/case.py" <<'PYTHON'
import os
import sys

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29582", RANK="0", WORLD_SIZE="1")
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (1,))


class Model(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.bank = nn.Parameter(torch.ones(rows, 4))

    def forward(self, x):
        return self.linear(x).sum() + self.bank.sum()


def sharded(model):
    return fully_shard(model, mesh=mesh)


def outcome(wrap, rows):
    model = Model(rows)
    optimizer = torch.optim.SGD(wrap(model).parameters(), lr=0.1)
    try:
        model(torch.ones(2, 4)).backward()
        optimizer.step()
    except RuntimeError as error:
        return f"RuntimeError: {error}".splitlines()[0]
    return "trains"


found = {
    "DDP, no rows": outcome(DistributedDataParallel, 0),
    "FSDP2, one row": outcome(sharded, 1),
    "FSDP2, no rows": outcome(sharded, 0),
}
for name, what in found.items():
    print(f"{name:<16} {what}")
dist.destroy_process_group()
is_so = [what.partition(":")[0] for what in found.values()]
sys.exit(is_so != ["trains", "trains", "RuntimeError"])
PYTHON
"$folder/venv/bin/python" "$folder/case.py"
