"""Methods other than Top-K in TensorFlow: dense in a fixed order."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
from tapes import Linear, noise

import horovod_topk.tensorflow

SHAPES = [(60, 50), (7,), (515,)]


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
