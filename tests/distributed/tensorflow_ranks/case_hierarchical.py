"""The hierarchical exchange in TensorFlow, on nodes that a case makes up.

Process sets and collectives are Horovod's; only where a rank says it runs is made up: three ranks
on nodes of two and one, four on two nodes of two, two on a node each.
"""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
from tapes import Linear, noise

from horovod_topk.core.plan.nodes import Location
from horovod_topk.errors import StateDictError
from plain import PlainTopKEF as TopKEF

SHAPES = [(60, 50), (7,), (515,)]


@pytest.fixture(autouse=True)
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Two nodes of all ranks, the first the larger one."""
    first = -(-hvd.size() // 2)
    nodes = [list(range(first)), list(range(first, hvd.size()))]
    here = Location("host", 0, int(hvd.rank() >= first))
    monkeypatch.setattr("horovod_topk.process_sets.here", lambda rank, local: here)
    return nodes


def hierarchical(**settings: Any) -> TopKEF:
    return TopKEF(**{"ratio": 0.1, "min_numel": 0, "exchange": "hierarchical", **settings})


def gradients(step: int) -> list[Any]:
    return [noise(hvd.rank(), 10 * step + i, shape) for i, shape in enumerate(SHAPES)]


def copies(state: Any) -> list[Any]:
    return [residual.numpy() for residual in state["owned"]["residuals"].values()]


def test_the_state_of_another_rank_is_refused() -> None:
    compression, model = hierarchical(), Linear(SHAPES)
    model.exchange(compression, gradients(0))
    before = copies(compression.state_dict())
    state = compression.state_dict()
    state["owned"]["rank"] = 1 - hvd.rank()
    with pytest.raises(StateDictError, match=r"on nodes \[\[0\], \[1\]\], this is rank"):
        compression.load_state_dict(state)
    early = hierarchical()
    early.load_state_dict(state)  # nothing is known of nodes yet
    with pytest.raises(StateDictError, match=r"on nodes \[\[0\], \[1\]\], this is rank"):
        Linear(SHAPES).exchange(early, gradients(1))
    assert all(map(np.array_equal, copies(compression.state_dict()), before))


@pytest.mark.slow
@pytest.mark.world_size(3, 4)
def test_stats_say_how_it_travels(nodes: list[list[int]]) -> None:
    compression, model = hierarchical(values="int8"), Linear(SHAPES)
    model.exchange(compression, gradients(0), graph=True)
    stats, owners = compression.stats(), min(map(len, nodes))
    assert (stats.exchange, stats.ranks) == ("hierarchical", hvd.size())
    assert stats.nodes == tuple(map(len, nodes))
    owns = hvd.rank() in [rank for node in nodes for rank in node[:owners]]
    assert stats.node_bytes is not None
    assert stats.between_bytes == (stats.node_bytes // owners if owns else 0)
    assert (stats.owned_norm > 0) == owns
    assert stats.residual_norm == 0


@pytest.mark.world_size(2, 4)
def test_auto_takes_what_sends_least() -> None:
    """And says which and why; a checkpoint taken before the first step waits for the choice."""
    compression, other = (hierarchical(exchange="auto", values="int8") for _ in range(2))
    model = Linear(SHAPES)
    model.exchange(compression, gradients(0), graph=True)
    stats = compression.stats()
    assert stats.exchange == {2: "allgather", 4: "hierarchical"}[hvd.size()]
    assert f"{stats.exchange} {stats.node_bytes:,}" in stats.because
    other.load_state_dict(compression.state_dict())
    expected = model.exchange(compression, gradients(1))
    assert all(map(np.array_equal, Linear(SHAPES).exchange(other, gradients(1)), expected))
