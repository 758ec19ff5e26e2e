"""The sharded exchange in TensorFlow: equal bits, nothing lost, checkpoints of owners too."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from tapes import Linear, noise

from horovod_topk.errors import ShapeChangedError
from plain import PlainTopKEF as TopKEF

SHAPES = [(60, 50), (7,), (515,)]


def sharded(**settings: Any) -> TopKEF:
    return TopKEF(**{"ratio": 0.1, "min_numel": 0, "exchange": "sharded", **settings})


def gradients(step: int) -> list[Any]:
    return [noise(hvd.rank(), 10 * step + i, shape) for i, shape in enumerate(SHAPES)]


def some_of(model: Linear, *positions: int) -> Linear:
    """The same variables, some of them."""
    part = Linear([])
    part.variables = [model.variables[i] for i in positions]
    return part


@pytest.mark.one_in(2)
@pytest.mark.parametrize("settings", [{"exchange": "sharded"}, {"exchange": "allgather"}], ids=str)
def test_what_was_loaded_waits_for_the_step_that_asks_for_it(settings: Any) -> None:
    """A variable without a gradient, a save in between, and then both."""
    first, second, third = (TopKEF(ratio=0.1, min_numel=0, **settings) for _ in range(3))
    model, other, last = (Linear(SHAPES[:2]) for _ in range(3))
    for step in range(3):
        model.exchange(first, gradients(step)[:2])
    state = first.state_dict()
    second.load_state_dict(state)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(other.variables[0] * gradients(3)[0])
    tape = hvd.DistributedGradientTape(tape, compression=second)
    assert tape.gradient(loss, other.variables)[1] is None
    again = second.state_dict()
    assert set(again["residuals"]) == set(state["residuals"])
    third.load_state_dict(again)
    expected = other.exchange(second, gradients(4)[:2])
    assert all(map(np.array_equal, last.exchange(third, gradients(4)[:2]), expected))


def test_a_variable_in_two_lists_under_two_names_is_refused() -> None:
    """Its residual is split by its name: read by another, elements would go astray."""
    compression, model = sharded(), Linear([(600,), (600,)])
    model.exchange(compression, [noise(hvd.rank(), i, (600,)) for i in range(2)])
    with pytest.raises(ShapeChangedError, match=r"is split as .*names of their own"):
        some_of(model, 1).exchange(compression, [noise(hvd.rank(), 3, (600,))])
