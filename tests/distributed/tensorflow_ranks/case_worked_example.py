"""The worked example of a compression method runs in TensorFlow, also after a checkpoint."""

from __future__ import annotations

from pathlib import Path

import horovod.tensorflow as hvd
import numpy as np
import pytest
from tapes import Linear, noise

import horovod_topk.tensorflow
from horovod_topk import checkpoint
from worked_example import register

SHAPES = [(60, 50), (7,), (515,)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
def test_it_exchanges_and_resumes_to_the_bit(exchange: str, tmp_path: Path) -> None:
    method = register(tmp_path)
    folder = hvd.broadcast_object(tmp_path, root_rank=0, name="folder")
    compressor = getattr(horovod_topk.tensorflow, method.__name__)
    first, second = (compressor(exchange=exchange, min_numel=16, name=exchange) for _ in range(2))
    model, other = Linear(SHAPES), Linear(SHAPES)

    def gradients(step: int) -> list[np.ndarray]:
        return [noise(hvd.rank(), 10 * step + i, shape) for i, shape in enumerate(SHAPES)]

    sent = [np.zeros(shape) for shape in SHAPES]
    for step in range(3):
        sent = [a + b for a, b in zip(sent, model.exchange(first, gradients(step)), strict=True)]
    checkpoint.save(folder, first)
    checkpoint.load(folder, second)
    for step in range(3, 6):
        expected = model.exchange(first, gradients(step))
        assert all(map(np.array_equal, other.exchange(second, gradients(step)), expected))
    assert first.stats().residual_norm > 0
    assert first.stats().reduction > 2
    gathered = hvd.allgather_object([each.tobytes() for each in expected], name="exchanged")
    assert all(each == gathered[0] for each in gathered)
