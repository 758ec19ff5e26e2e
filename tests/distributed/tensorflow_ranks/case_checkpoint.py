"""Checkpoints in TensorFlow: loaded before the first step or after it, they are the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
from tapes import Linear, noise

from horovod_topk import checkpoint
from horovod_topk.errors import StateDictError
from plain import PlainTopKEF as TopKEF

SHAPES = [(60, 50), (7,), (515,)]


def gradients(step: int) -> list[Any]:
    return [noise(hvd.rank(), 10 * step + i, shape) for i, shape in enumerate(SHAPES)]


def resumed(folder: Path, first: TopKEF, second: TopKEF, *, stepped: bool) -> tuple[Linear, Linear]:
    """A model of `first` after three steps, and one of `second`, which has loaded what it saved."""
    model, other = Linear(SHAPES), Linear(SHAPES)
    for step in range(3):
        model.exchange(first, gradients(step))
    checkpoint.save(folder, first)
    hvd.allgather_object("saved", name="saved")
    if stepped:
        other.exchange(second, gradients(9))
    checkpoint.load(folder, second)
    return model, other


@pytest.mark.one_in(6)
@pytest.mark.world_size(2, 4)
@pytest.mark.parametrize("stepped", [False, True], ids=["before a step", "after a step"])
@pytest.mark.parametrize("exchange", ["allgather", "sharded", "hierarchical"])
def test_resume_is_bitwise(exchange: str, stepped: bool, tmp_path: Path) -> None:
    folder = hvd.broadcast_object(tmp_path, root_rank=0, name="folder")
    first, second = (
        TopKEF(ratio=0.1, min_numel=0, values="int8", exchange=exchange) for _ in range(2)
    )
    model, other = resumed(folder, first, second, stepped=stepped)
    for step in range(3, 6):
        expected = model.exchange(first, gradients(step))
        assert all(map(np.array_equal, other.exchange(second, gradients(step)), expected))


def test_residuals_in_other_units_are_refused_by_the_first_step(tmp_path: Path) -> None:
    """Before it nobody knows what the gradients will be reduced to."""
    folder = hvd.broadcast_object(tmp_path, root_rank=0, name="folder")
    first, second = (TopKEF(ratio=0.1, min_numel=0) for _ in range(2))
    _, other = resumed(folder, first, second, stepped=False)
    with pytest.raises(StateDictError, match=r"reduced to their average, these .* to their sum"):
        other.exchange(second, gradients(3), op=hvd.Sum)
