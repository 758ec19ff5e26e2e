"""Methods other than Top-K in TensorFlow: dense in a fixed order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from oracle.two_rounds import TwoRounds
from tapes import Linear, noise

import horovod_topk.tensorflow
from horovod_topk import checkpoint
from horovod_topk.errors import UnsupportedOperationError
from horovod_topk.methods import METHODS

SHAPES = [(60, 50), (7,), (515,)]
METHODS["TwoRounds"] = TwoRounds


def gradients(rank: int, step: int) -> list[Any]:
    return [noise(rank, 10 * step + i, shape) for i, shape in enumerate(SHAPES)]


@pytest.mark.everywhere
@pytest.mark.world_size(2, 3, 4)
@pytest.mark.parametrize("exchange", ["sharded", "allreduce"])
@pytest.mark.parametrize("values", ["float32", "float16", "bfloat16"])
def test_dense_is_the_mean_in_rank_order(values: str, exchange: str) -> None:
    if exchange == "allreduce" and values != "float32":
        pytest.skip("it adds up in float32 alone")
    name = f"{values}-{exchange}"
    compression = horovod_topk.tensorflow.Dense(values=values, exchange=exchange, name=name)
    model = Linear(SHAPES)
    sent, got = ([np.zeros(shape) for shape in SHAPES] for _ in range(2))
    for step in range(4):
        exchanged = model.exchange(compression, gradients(hvd.rank(), step))
        ranks = [gradients(rank, step) for rank in range(hvd.size())]
        total = [np.float32(0) * each for each in ranks[0]]
        for one in ranks:
            total = [np.asarray(a + b, "f4") for a, b in zip(total, one, strict=True)]
        mean = [each * np.float32(1 / hvd.size()) for each in total]
        if values == "float32" and (exchange == "sharded" or hvd.size() == 2):
            assert all(map(np.array_equal, exchanged, mean))
        sent = [a + b for a, b in zip(sent, mean, strict=True)]
        got = [a + b for a, b in zip(got, exchanged, strict=True)]
    error = max(np.abs(a - b).max() for a, b in zip(sent, got, strict=True))
    assert error < {"float32": 1e-6, "float16": 2e-2, "bfloat16": 2e-1}[values]
    rounded = compression.stats().residual_norm > 0
    assert rounded == (values != "float32")


@pytest.mark.everywhere
@pytest.mark.world_size(2, 3, 4)
def test_a_checkpoint_goes_on_and_a_nan_changes_nothing(tmp_path: Path) -> None:
    folder = hvd.broadcast_object(tmp_path, root_rank=0, name="folder")
    first, second = (horovod_topk.tensorflow.Dense(name=f"dense.{i}") for i in range(2))
    model, other = Linear(SHAPES), Linear(SHAPES)
    for step in range(3):
        model.exchange(first, gradients(hvd.rank(), step))
    checkpoint.save(folder, first)
    checkpoint.load(folder, second)
    for step in range(3, 6):
        if step == 4:
            bad = [np.array(each) for each in gradients(hvd.rank(), 99)]
            bad[0][3, 3] = np.nan if hvd.rank() == 1 else 0
            exchanged = other.exchange(second, [tf.constant(each) for each in bad])
            assert np.isnan(exchanged[0]).all()
            assert np.isfinite(exchanged[1]).all()
        expected = model.exchange(first, gradients(hvd.rank(), step))
        assert all(
            map(np.array_equal, other.exchange(second, gradients(hvd.rank(), step)), expected)
        )
    assert second.stats().rolled_back == 1
    gathered = hvd.allgather_object([each.tobytes() for each in expected], name="exchanged")
    assert all(each == gathered[0] for each in gathered)


def test_a_method_of_rounds_is_refused() -> None:
    compression = horovod_topk.tensorflow.TwoRounds()
    with pytest.raises(UnsupportedOperationError, match="TwoRounds is a method of rounds"):
        Linear(SHAPES).exchange(compression, gradients(hvd.rank(), 0))
