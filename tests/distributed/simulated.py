"""Real ranks, step by step, beside simulated ones in NumPy that share no framework with them.

Each row of `ROWS` is a compressor. The exchanged gradients of a rank and all state that it
keeps have the bits of this rank in `oracle.world`. There the laws are tested, for hundreds of jobs;
here that each adapter, with each launcher, runs the same steps. Among them are a step with a NaN on
one rank, a state dict that another optimizer goes on from, and a step that sends everything.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import numpy as np
from oracle.dithered import Dithered
from oracle.numpy_ops import NumpyOps
from oracle.two_rounds import TwoRounds
from oracle.world import World

from horovod_topk.core.plan.buckets import Plan
from horovod_topk.core.plan.nodes import Nodes
from horovod_topk.core.state.state_dict import parts_of
from horovod_topk.methods import METHODS
from worked_example import register

METHODS |= {"TwoRounds": TwoRounds, "Dithered": Dithered}
with tempfile.TemporaryDirectory() as folder:
    EXAMPLE = register(Path(folder)).__name__  # of docs/adding-a-method.md
NUMPY: Any = SimpleNamespace(
    ops=NumpyOps(), array=lambda values, dtype: np.array(values, dtype), numpy=np.copy
)
SHAPES = (40, 33), (7,), (1100,)
SPOILED, RESUMED, DENSE, STEPS = 2, 3, 5, 7  # steps with a NaN, after loading, that send everything


class Row(NamedTuple):
    """A compressor: its class, its settings, and whether results have the bits of NumPy's."""

    method: str
    settings: Mapping[str, Any]
    to_the_bit: bool = True  # libraries multiply matrices in orders of their own


def of(method: str = "TopKEF", *, to_the_bit: bool = True, **settings: Any) -> Row:
    """Make a row whose default is TopKEF at ratio 0.1 with no optimizer-dependent settings."""
    plain = {"ratio": 0.1, "values": "float32", "momentum": 0, "follow_lr": False, "warmup": None}
    settings = {"min_numel": 8, **(plain if method == "TopKEF" else {}), **settings}
    if method in ("Dense", "OneBit"):
        settings = {k: v for k, v in settings.items() if (method, k) != ("Dense", "min_numel")}
    return Row(method, settings, to_the_bit)


def long_alone(name: str, shape: tuple[int, ...]) -> bool:
    """A pattern of `ratios=`."""
    return shape == (1100,)


OWN = {"ratio": {long_alone: "dense", "*": 0.1}}
ROWS = {
    "top-k": of(),
    "top-k, small tensors whole": of(min_numel=300, values="float16"),
    "top-k, everything": of(ratio=1.0),
    "top-k, bfloat16": of(values=("bfloat16", "plain")),
    "top-k, int8": of(values="int8", selection="sampled"),
    "top-k, int4, own ratios": of(values="int4", **OWN),
    "top-k, int3": of(values="int3"),
    "top-k, warm-up": of(ratio=0.05, warmup=[(2, 0.5), (4, 0.2)]),
    "top-k, corrected momentum": of(momentum=0.9),
    "top-k, Nesterov's": of(momentum=(0.9, "nesterov")),
    "top-k, narrow residuals": of(residuals="int4"),  # not in TensorFlow
    "top-k, adaptive": of(allocation="adaptive"),
    "sharded": of(exchange="sharded"),
    "sharded, int8, fewer back": of(exchange="sharded", values="int8", ratio=(0.1, 0.02)),
    "sharded, adaptive": of(exchange="sharded", values="int4", allocation="adaptive"),
    "sharded, int2": of(exchange="sharded", values="int2"),
    "sharded, signs, own ratios": of(exchange="sharded", values="sign", **OWN),
    "sharded, warm-up": of(exchange="sharded", ratio=0.05, warmup=[(2, 0.5), (4, 0.2)]),
    "sharded, corrected momentum": of(exchange="sharded", momentum=0.9),
    "hierarchical": of(exchange="hierarchical"),
    "hierarchical, int8": of(exchange="hierarchical", values="int8", min_numel=300),
    "hierarchical, own ratios": of(exchange="hierarchical", **OWN),
    "dense": of("Dense"),
    "dense, float16": of("Dense", values="float16"),
    "dense over an allgather": of("Dense", exchange="allgather", values="bfloat16"),
    "Horovod's allreduce": of("Dense", exchange="allreduce", to_the_bit=False),
    "random numbers": of("Dithered"),
    "random numbers, sharded": of("Dithered", exchange="sharded"),
    "two rounds": of("TwoRounds", columns=3, to_the_bit=False),
    "random k": of("RandomK", ratio=0.1),
    "random k, allgather": of("RandomK", ratio=0.1, exchange="allgather"),
    "random k, scaled": of("RandomK", ratio=0.5, error_feedback=False),
    "qsgd": of("QSGD", exchange="sharded"),
    "qsgd, unbiased": of("QSGD", bits=2),
    "signs": of("SignSGD"),
    "majority": of("SignSGD", majority=True),
    "one bit": of("OneBit"),
    "bytes": of("ByteGrad"),
    "terngrad": of("TernGrad"),
    "terngrad, sharded": of("TernGrad", exchange="sharded"),
    "threshold": of("Threshold", max_ratio=0.2, threshold=2.0),
    "powersgd": of("PowerSGD", rank=1, to_the_bit=False),
    "the page's example": of(EXAMPLE),
    "the page's example, sharded": of(EXAMPLE, exchange="sharded"),
}


class Harness(Protocol):
    """One rank's model and optimizer or tape, in a framework: three tensors of `SHAPES`."""

    compression: Any  # what `getattr(adapter, row.method)(**row.settings)` made
    names: Sequence[str]  # of the tensors
    plan: Plan  # known after the first exchange

    def exchange(self, gradients: Sequence[Any]) -> list[Any]:
        """Exchange this rank's gradients and step, unless there is a NaN among the exchanged."""
        ...


def gradients_of(rank: int, step: int) -> list[Any]:
    """Return a rank's gradients in a step. In one step rank 1 has a NaN."""
    random = np.random.default_rng([rank, step])
    found = [random.standard_normal(shape).astype(np.float32) for shape in SHAPES]
    if (rank, step) == (1, SPOILED):
        found[0][3, 4] = np.nan
    return found


def usual_nodes(ranks: int) -> Nodes:
    """Two nodes of all ranks, the first the larger one."""
    first = -(-ranks // 2)
    return Nodes((tuple(range(first)), tuple(range(first, ranks))))


def assert_as_simulated(make: Any, row: Row, rank: int, ranks: int) -> None:
    """Train real and simulated ranks on the same gradients, and compare them after each step.

    make: returns a new `Harness`, given a name for the compressor.
    """
    real: Harness = make("first")
    world: World | None = None
    for step in range(STEPS):
        everyone = [gradients_of(each, step) for each in range(ranks)]
        if step == RESUMED:
            kept, real = real.compression.state_dict(), make("again")
            real.compression.load_state_dict(kept)
        if step >= DENSE and world is not None:
            for each in (real.compression, *world.ranks):
                each.set_ratio(1.0 if step == DENSE and sends_less(row) else None)
        exchanged = real.exchange(everyone[rank])
        if world is None:
            world = World(real.plan, ranks, NUMPY, nodes=usual_nodes(ranks))
        named = [dict(zip(real.names, each, strict=True)) for each in everyone]
        expected = world.exchange(named)[rank]
        world.rollback() if step == SPOILED else world.commit()
        for name, mine in zip(real.names, exchanged, strict=True):
            assert_equal(mine, expected[name], row, f"step {step}: gradient of {name}")
        state, theirs = real.compression.state_dict(), world.ranks[rank].state_dict()
        assert state["committed"] == theirs["committed"]
        assert_states_equal(state, theirs, row, f"step {step}")


def sends_less(row: Row) -> bool:
    """Whether a step that sends everything differs from others."""
    return row.settings.get("ratio") != 1.0 and row.method not in ("Dense", "TwoRounds")


def assert_states_equal(ours: Any, theirs: Any, row: Row, where: str) -> None:
    """Residuals, owners' residuals, velocities and the method's own state."""
    assert parts_of(ours) == parts_of(theirs)
    for part in (None, *parts_of(ours)):
        mine, its = (
            d["residuals"] if part is None else d[part]["residuals"] for d in (ours, theirs)
        )
        assert mine.keys() == its.keys()
        for name, array in mine.items():
            assert_equal(array, its[name], row, f"{where}: {part or 'residual'} of {name}")


def assert_equal(ours: Any, theirs: Any, row: Row, where: str) -> None:
    """Equal bits but for the sign of zero, or nearly equal."""
    mine = np.asarray(ours).reshape(-1)
    its = np.asarray(theirs).reshape(-1)
    if row.to_the_bit:
        assert np.array_equal(mine, its, equal_nan=True), where
    else:
        np.testing.assert_allclose(mine, its, rtol=1e-4, atol=1e-5, err_msg=where)
