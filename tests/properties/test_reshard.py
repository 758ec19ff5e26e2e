"""With whatever number of ranks and exchange a job goes on, together they owe the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from oracle.backends import NUMPY, Backend
from oracle.world import World, drawn, nodes_of_sizes

from horovod_topk.core.plan.buckets import TensorSpec, make_plan
from horovod_topk.core.state.reshard import pending, share_out
from horovod_topk.methods.topk import TopK

SPECS = [
    TensorSpec("w", (70, 60), "float32"),  # in more blocks than there are ranks
    TensorSpec("b", (3,), "float32"),  # owned by one rank
    TensorSpec("none", (0,), "float32"),
]
SIZES = {4: (2, 2), 6: (3, 3), 8: (3, 5)}  # of nodes, by ranks
JOBS = [
    (exchange, ranks)
    for exchange in ("allgather", "sharded", "hierarchical")
    for ranks in (4, 6, 8)
]


def job(backend: Backend, exchange: str, ranks: int, reduction: str, steps: int) -> World:
    config = TopK(ratio=0.05, min_numel=0, exchange=exchange, values="float32")
    plan = make_plan(SPECS, config, reduction)
    world = World(plan, ranks, backend, nodes=nodes_of_sizes(SIZES[ranks]))
    noise = np.random.default_rng(ranks)
    for _ in range(steps):
        world.step(drawn(SPECS, ranks, noise))
    return world


def owed(world: World, reduction: str) -> dict[str, Any]:
    ops = world.backend.ops
    states = (compressor.state_dict() for compressor in world.ranks)
    total = pending(states, world.size, reduction, ops)
    return {name: world.backend.numpy(array) for name, array in total.items()}


def reload(old: World, new: World, reduction: str) -> None:
    """What a restart with another number of ranks does."""
    ops = old.backend.ops
    total = pending((c.state_dict() for c in old.ranks), old.size, reduction, ops)
    for compressor in new.ranks:
        own = compressor.state_dict()
        compressor.load_state_dict(share_out(total, own, new.size, reduction, ops))


@pytest.mark.one_in(5)
@pytest.mark.parametrize("reduction", ["average", "sum"])
@pytest.mark.parametrize("after", JOBS, ids=str)
@pytest.mark.parametrize("before", JOBS, ids=str)
def test_the_pending_mass_stays(before: Any, after: Any, reduction: str) -> None:
    old = job(NUMPY, *before, reduction, steps=4)
    new = job(NUMPY, *after, reduction, steps=1)
    reload(old, new, reduction)
    kept, found = owed(old, reduction), owed(new, reduction)
    assert kept["w"].any()
    for name, mass in kept.items():
        np.testing.assert_allclose(
            found[name], mass, rtol=1e-6, atol=1e-6 * abs(mass).max(initial=0)
        )
