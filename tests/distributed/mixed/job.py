"""Rank 0 in PyTorch and rank 1 in TensorFlow, in one job; see test_mixed.py.

    horovodrun -np 2 --gloo python job.py FOLDER

Both ranks have the same gradients, so both must send the same bytes. Each writes what it keeps, the
exchanged gradients of every step and what it gathered to FOLDER/rank-N.npz, for each of `SETTINGS`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from horovod_topk.guard import Guard

SHAPES = {"v0": (300, 40), "v1": (70, 3), "v2": (9,), "v3": ()}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"ratio": 0.05, "min_numel": 16, "values": "float16", "momentum": 0, "warmup": None},
    "corrected": {"ratio": 0.05, "min_numel": 16, "momentum": 0.9, "warmup": [(2, 0.5)]},
}
# The default is one in PyTorch, and none in TensorFlow.
SETTINGS["plain"]["guard"], SETTINGS["corrected"]["guard"] = Guard(), None
STEPS = 6
RANK = int(os.environ.get("HOROVOD_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])


def gradients(step: int) -> list[np.ndarray[Any, Any]]:
    """The same on both ranks, with ties."""
    random = np.random.default_rng(step)
    drawn = [np.asarray(random.standard_normal(shape)) for shape in SHAPES.values()]
    return [np.asarray(each.round(2), np.float32) for each in drawn]


def in_torch() -> dict[str, Any]:
    """Rank 0; it also keeps what arrives."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for run, settings in SETTINGS.items():
        found |= {f"{run}-{name}": array for name, array in torch_run(settings).items()}
    hvd.shutdown()
    return found


def torch_run(settings: dict[str, Any]) -> dict[str, Any]:
    import horovod.torch as hvd
    import torch

    from horovod_topk.torch import TopKEF

    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES.values()]
    gathered, synchronize = [], hvd.synchronize

    def kept(handle: int) -> torch.Tensor:
        result = synchronize(handle)
        gathered.append(result.numpy().copy())
        return result

    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=0.1),
        named_parameters=zip(SHAPES, parameters, strict=True),
        compression=TopKEF(**settings, follow_lr=False),
    )
    hvd.synchronize = kept
    found: dict[str, Any] = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        pairs = zip(parameters, gradients(step), strict=True)
        sum((p * torch.from_numpy(g)).sum() for p, g in pairs).backward()
        optimizer.synchronize()
        found |= {f"{n}-{step}": p.grad.numpy() for n, p in zip(SHAPES, parameters, strict=True)}
        with optimizer.skip_synchronize():
            optimizer.step()
    hvd.synchronize = synchronize
    found |= in_numpy(TopKEF.of(optimizer).state_dict())
    return found | {f"gathered-{step}": each for step, each in enumerate(gathered)}


def in_numpy(state: dict[str, Any]) -> dict[str, Any]:
    """What is kept."""
    found = {f"residual-{name}": e.numpy() for name, e in state["residuals"].items()}
    velocities = state.get("velocity", {"residuals": {}})["residuals"]
    return found | {f"velocity-{name}": u.numpy() for name, u in velocities.items()}


def in_tensorflow() -> dict[str, Any]:
    """Rank 1."""
    sys.path[:] = [path for path in sys.path if not path.endswith("without_tensorflow")]
    import horovod.tensorflow as hvd

    hvd.init()
    found: dict[str, Any] = {}
    for run, settings in SETTINGS.items():
        found |= {f"{run}-{name}": array for name, array in tensorflow_run(settings).items()}
    hvd.shutdown()
    return found


def tensorflow_run(settings: dict[str, Any]) -> dict[str, Any]:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from horovod_topk.tensorflow import TopKEF

    variables = [tf.Variable(tf.zeros(shape), name=name) for name, shape in SHAPES.items()]
    compression = TopKEF(**settings)  # a tape follows no learning rate

    @tf.function
    def step(*mine: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(v * g) for v, g in zip(variables, mine, strict=True)])
        return hvd.DistributedGradientTape(tape, compression=compression).gradient(loss, variables)

    found: dict[str, Any] = {}
    for position in range(STEPS):
        exchanged = step(*map(tf.constant, gradients(position)))
        found |= {f"{n}-{position}": g.numpy() for n, g in zip(SHAPES, exchanged, strict=True)}
    return found | in_numpy(compression.state_dict())


if __name__ == "__main__":
    arrays = in_tensorflow() if RANK else in_torch()
    np.savez(Path(sys.argv[1]) / f"rank-{RANK}.npz", **arrays)
