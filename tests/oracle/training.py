"""A short training job over any collective, and a program that runs it under plain `mpirun`.

    mpirun -np 3 python tests/oracle/training.py FOLDER [EXCHANGE]

Nodes, where the exchange asks for them, are made up: two ranks on each. Each rank writes
FOLDER/<rank>.npz. Nothing of Horovod is loaded.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_topk.core.codec.codec import PayloadCodec
from horovod_topk.core.exchange.agreement import agree
from horovod_topk.core.exchange.protocol import Collective
from horovod_topk.core.exchange.selection import make_exchange
from horovod_topk.core.plan.buckets import TensorSpec, make_plan
from horovod_topk.core.plan.nodes import Nodes
from horovod_topk.core.run.runner import StepRunner
from horovod_topk.methods.topk import TopK
from oracle.numpy_ops import NumpyOps

STEPS = 6
SKIPPED = 3  # the step in which rank 1 has a NaN
SPECS = (
    TensorSpec("embedding", (300, 250), "float32"),  # 32-bit indices
    TensorSpec("weight", (40, 50), "float32"),
    TensorSpec("half", (60, 20), "float16"),
    TensorSpec("double", (1500,), "float64"),  # a bucket of its own
    TensorSpec("bias", (50,), "float32"),  # dense
    TensorSpec("scale", (), "float32"),
)


def train(collective: Collective[Any], kind: str = "allgather") -> dict[str, NDArray[Any]]:
    """All exchanged gradients and the last residuals of one rank."""
    plan = make_plan(SPECS, TopK(ratio=0.02, values="float16", exchange=kind))
    ops = NumpyOps()
    ordinal = agree(plan, 0, ops, collective)
    exchange = make_exchange(kind, collective, pairs(collective.size))
    compressor = StepRunner(plan, ops, PayloadCodec(ops), exchange, f"oracle.{ordinal}")
    result = dict[str, NDArray[Any]]()
    for step in range(STEPS):
        exchanged = _step(compressor, _gradients(collective.rank, step))
        assert compressor.commit() is (step != SKIPPED)
        result |= {f"{step}.{name}": g for name, g in exchanged.items()}
    kept = compressor.registry if compressor.owned is None else compressor.owned
    return result | {f"residual.{s.name}": kept.residual(s.name) for s in SPECS}


def pairs(size: int) -> Nodes:
    """Nodes of two ranks, the last of one if they do not divide."""
    return Nodes(tuple(tuple(range(at, min(at + 2, size))) for at in range(0, size, 2)))


def _gradients(rank: int, step: int) -> dict[str, NDArray[Any]]:
    random = np.random.default_rng([rank, step])
    result = {s.name: np.asarray(random.standard_normal(s.shape), s.dtype) for s in SPECS}
    if (rank, step) == (1, SKIPPED):
        result["weight"][3, 4] = np.nan
    return result


def _step(
    compressor: StepRunner[NDArray[Any]], gradients: dict[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    buckets = {
        bucket.ordinal: [gradients[t.spec.name] for t in bucket.tensors]
        for bucket in compressor.plan.buckets
    }
    for ordinal, arrays in buckets.items():
        compressor.launch(ordinal, arrays)
    compressor.step.finish(buckets)
    return gradients


def main(folder: Path, kind: str = "allgather") -> None:
    """Run on MPI's world."""
    from mpi4py import MPI

    from oracle.mpi import MpiCollective

    collective = MpiCollective(MPI.COMM_WORLD)
    result = train(collective, kind)
    assert not {"horovod", "torch"} & set(sys.modules)
    np.savez(folder / f"{collective.rank}.npz", **result)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
