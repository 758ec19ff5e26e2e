"""What one rank may do alone: nothing that all have in common. Every rank raises, and names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import pytest
import tensorflow as tf
from tapes import Linear, Run, noise

from horovod_topk.errors import PlanMismatchError
from horovod_topk.tensorflow import TopKEF

ODD = 1  # the rank that does something alone
STATE = "a state that was loaded or reset"


def allocate(own: TopKEF, saved: dict[str, Any]) -> None:
    """Give one tensor more bytes than the other ranks give it."""
    own.behind._state.allocation = (("v0", 3),)


ACTS: dict[str, tuple[Callable[[TopKEF, dict[str, Any]], None], str]] = {
    "set_ratio": (lambda own, _: own.set_ratio(1.0), "the ratio of this step"),
    "load": (lambda own, saved: own.load_state_dict(saved), "the number of committed steps"),
    "reset": (lambda own, _: own.reset(), STATE),
    "allocate": (allocate, STATE),
}


def said(error: BaseException) -> str:
    """The error's own text: TensorFlow puts that of a graph into one of its own."""
    lines = str(error).splitlines()
    return next(line[line.index("ranks disagree") :] for line in lines if "ranks disagree" in line)


@pytest.mark.one_in(20)
@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
@pytest.mark.parametrize(
    ("act", "graph"),
    [*((act, False) for act in ACTS), *((act, True) for act in ACTS if act != "allocate")],
)
def test_every_rank_names_the_one_that_changed(act: str, exchange: str, graph: bool) -> None:
    does, text = ACTS[act]
    by = "adaptive" if act == "allocate" else "uniform"
    compression = TopKEF(warmup=None, exchange=exchange, min_numel=0, allocation=by)
    compression.set_ratio(None)  # graphs have a branch for each ratio
    run = Run(compression, graph)
    run.take(0)
    saved = compression.state_dict()
    run.take(1)
    if hvd.rank() == ODD:
        does(compression, saved)
    with pytest.raises(tf.errors.OpError if graph else PlanMismatchError) as raised:
        run.take(2)
    texts = hvd.allgather_object(said(raised.value))
    assert len({*texts}) == 1, texts
    assert texts[0].startswith(f"ranks disagree on {text}"), texts
    assert f"on rank {ODD}" in texts[0]


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
def test_one_rank_dense(graph: bool) -> None:
    model = Linear([(30, 20)])
    compression = hvd.Compression.none if hvd.rank() == ODD else TopKEF()
    with pytest.raises(PlanMismatchError, match=r"method: .*NoneCompressor"):
        model.exchange(compression, [noise(hvd.rank(), 0, (30, 20))], graph=graph)
