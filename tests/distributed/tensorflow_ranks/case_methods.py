"""Methods other than Top-K in TensorFlow: dense in a fixed order, and one of two rounds."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from oracle.dithered import Dithered
from oracle.two_rounds import TwoRounds
from proof import assert_ranks_equal
from tapes import Linear, noise

import horovod_topk.tensorflow
from horovod_topk.core.codec.codec import PayloadCodec
from horovod_topk.core.state.state_dict import parts_of
from horovod_topk.errors import PayloadError, PlanMismatchError
from horovod_topk.methods import METHODS

SHAPES = [(60, 50), (7,), (515,)]
METHODS |= {"TwoRounds": TwoRounds, "Dithered": Dithered}
WAYS = pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])


def gradients(rank: int, step: int, shapes: Any = SHAPES) -> list[Any]:
    return [noise(rank, 10 * step + i, shape) for i, shape in enumerate(shapes)]


def arrays_in(state: Any) -> dict[str, bytes]:
    """Residuals of a state dict, and what it has beside them: owners' residuals, method state."""
    parts = {"": state, **{part: state[part] for part in parts_of(state)}}
    return {
        f"{part}.{name}": each.numpy().tobytes()
        for part, holder in parts.items()
        for name, each in holder["residuals"].items()
    }


SMALL = {
    "of a sum": ("TwoRounds", {}, (10, 8)),
    "of a shard": ("Dense", {}, (7,)),
    "of a node's sum": ("TopKEF", {"exchange": "hierarchical"}, (7,)),
}


@pytest.mark.world_size(2, 3, 4)
@pytest.mark.parametrize("owner", SMALL)
def test_a_bucket_of_which_some_rank_owns_nothing(owner: str) -> None:
    """TensorFlow must neither send what is constant while it builds a graph, nor leave it out."""
    name, settings, shape = SMALL[owner]
    compression = getattr(horovod_topk.tensorflow, name)(name=f"small.{name}", **settings)
    model = Linear([shape])
    for step in range(3):
        exchanged = model.exchange(compression, [noise(hvd.rank(), step, shape)], graph=True)
        assert_ranks_equal(exchanged)
    assert compression.stats().steps == 3


@pytest.mark.one_in(8)
@WAYS
@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("direction", range(4))
def test_a_rank_that_cannot_read_a_payload_ends_the_step_for_all(
    direction: int, graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """leg: scatter and gather of the first round, and of the second."""
    compression = horovod_topk.tensorflow.TwoRounds(name=f"fails.{graph}.{direction}")
    model, failing = Linear([(10, 8), (16, 8)]), hvd.rank() == 1
    check, directions = PayloadCodec._check, list[int]()

    def take(step: int) -> list[Any]:
        mine = gradients(hvd.rank(), step, [(10, 8), (16, 8)])
        return model.exchange(compression, mine, graph=graph)

    def refuse(*args: Any) -> list[bool]:
        directions.append(len(directions))
        if len(directions) == 4 + direction + 1:  # in the second step
            raise PayloadError("the test refuses it", cure="None")
        return check(*args)

    if failing:
        monkeypatch.setattr(PayloadCodec, "_check", staticmethod(refuse))
    take(0)
    before = arrays_in(compression.state_dict())
    if failing:
        with pytest.raises(tf.errors.OpError if graph else PayloadError, match="refuses it"):
            take(1)
    else:
        assert all(np.isnan(each).all() == (direction < 3) for each in take(1))
    if failing or direction < 3:  # when the last leg fails, the others have all that they need
        assert arrays_in(compression.state_dict()) == before
    if direction < 3:
        assert_ranks_equal(take(2))
        return
    with pytest.raises(  # the others have committed a step more
        tf.errors.OpError if graph else PlanMismatchError, match="committed steps"
    ):
        take(2)
