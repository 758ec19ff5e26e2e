#!/usr/bin/env bash
# torch.optim.Adafactor cannot step parameters that FSDP2 has sharded.
#
# PyTorch 2.13.0, on a CPU, one process with Gloo, no other package. The optimizer's documentation
# names no limit of this kind, and AdamW steps the same parameters. Adafactor takes the norm of each
# row and squares it in place. The norm of a sharded parameter is a DTensor whose ranks hold parts,
# and the in-place power is refused with a RuntimeError. It is so with one rank, too. The loop that
# PyTorch uses when foreach=True raises as well.
#
# Output seen on 2026-11-28:
#     AdamW                  steps
#     Adafactor              RuntimeError
#     Adafactor, foreach     RuntimeError
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

os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29581", RANK="0", WORLD_SIZE="1")
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (1,))


def outcome(make):
    model = nn.Linear(16, 8)
    fully_shard(model, mesh=mesh)
    optimizer = make(model.parameters())
    model(torch.randn(4, 16)).square().mean().backward()
    try:
        optimizer.step()
    except RuntimeError:
        return "RuntimeError"
    return "steps"


found = {
    "AdamW": outcome(torch.optim.AdamW),
    "Adafactor": outcome(torch.optim.Adafactor),
    "Adafactor, foreach": outcome(lambda p: torch.optim.Adafactor(p, foreach=True)),
}
for name, what in found.items():
    print(f"{name:<22} {what}")
dist.destroy_process_group()
sys.exit([*found.values()] != ["steps", "RuntimeError", "RuntimeError"])
PYTHON
"$folder/venv/bin/python" "$folder/case.py"
