"""`horovod-topk compare` on real ranks: a script with two lines more, also with Keras or FSDP2."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from launcher import REPOSITORY, WITHOUT_TENSORFLOW, run

pytestmark = [pytest.mark.distributed, pytest.mark.tools]

LIMIT = 400.0  # seconds; it needs about 30 on two idle cores
OPTIONS = {"gloo": [], "mpi": ["--mpi"], "torchrun": ["--torchrun", "--ranks", "4"]}

TORCH = """\
import horovod.torch as hvd
import horovod_topk
import torch
from horovod_topk.torch import TopKEF

hvd.init()
torch.manual_seed(horovod_topk.seed(0))
model = torch.nn.Linear(200, 10)
plain = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), compression=TopKEF(ratio=0.5))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
inputs = torch.randn(30, 200)
for step in range(1, 21):
    optimizer.zero_grad()
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        horovod_topk.report(step=step, loss=loss.item())
TopKEF.of(optimizer).stats()
"""

KERAS = """\
import horovod.tensorflow as hvd
import horovod_topk
import horovod_topk.tensorflow.keras as hvd_keras
import keras
import tensorflow as tf
from horovod_topk.tensorflow import TopKEF

hvd.init()
keras.utils.set_random_seed(horovod_topk.seed(0))
model = keras.Sequential([keras.Input((200,)), keras.layers.Dense(10)])
optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=TopKEF)
model.compile(optimizer=optimizer, loss="mse", jit_compile=False)
report = keras.callbacks.LambdaCallback(
    on_epoch_end=lambda epoch, logs: horovod_topk.report(step=5 * (epoch + 1), loss=logs["loss"])
)
data = tf.data.Dataset.from_tensors((tf.random.normal([30, 200]), tf.zeros([30, 10]))).repeat()
broadcast = hvd_keras.callbacks.BroadcastGlobalVariablesCallback(root_rank=0)
model.fit(data, epochs=4, steps_per_epoch=5, verbose=0, callbacks=[broadcast, report])
"""

FSDP = """\
import horovod_topk
import torch
import torch.distributed as dist
from horovod_topk.fsdp import TopKEF
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(horovod_topk.seed(0))
mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
model = fully_shard(torch.nn.Linear(400, 10), mesh=mesh["shard"])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
TopKEF(ratio=0.5).attach(model, optimizer, between=mesh["replicate"])
inputs = torch.randn(30, 400)
for step in range(1, 21):
    optimizer.zero_grad()
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        horovod_topk.report(step=step, loss=loss.item())
TopKEF.of(model).stats()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("script", "controller"),
    [(TORCH, "gloo"), (KERAS, "gloo"), (TORCH, "mpi"), (FSDP, "torchrun")],
)
def test_a_script_is_compared(script: str, controller: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script)
    stand_in = [] if script == KERAS else [str(WITHOUT_TENSORFLOW)]
    command = ["env", f"PYTHONPATH={os.pathsep.join([*stand_in, str(REPOSITORY)])}"]
    command += [sys.executable, "-m", "horovod_topk.cli", "compare", str(tmp_path / "train.py")]
    command += ["--seeds", "1", "--out", str(tmp_path / "kept")]
    command += ["--compressors", "TopKEF(ratio=0.1)"]
    command += ["--json", str(tmp_path / "out.json"), *OPTIONS[controller]]
    launch = run(command, tmp_path, LIMIT, {})
    assert launch.returncode == 0, launch.describe()
    assert not launch.left and not launch.immortal
    found = json.loads((tmp_path / "out.json").read_text())[0]
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows)[:2] == ["dense float32", "dense fp16"]
    assert all(set(row["outcomes"].values()) == {"done"} for row in rows.values())
    sparse, dense = rows["TopKEF(ratio=0.1)"], rows["dense float32"]
    assert sparse["bytes"] < rows["dense fp16"]["bytes"] < dense["bytes"]
    kept = [json.loads(path.read_text()) for path in (tmp_path / "kept").glob("*.json")]
    assert len(kept) == 3
    ends = {each["cell"]["compressor"]: each["points"][-1]["metrics"]["loss"] for each in kept}
    assert len(set(ends.values())) == len(ends)  # each compressor has trained
    assert all(each["seeded"] and each["points"][-1]["step"] == 20 for each in kept)
