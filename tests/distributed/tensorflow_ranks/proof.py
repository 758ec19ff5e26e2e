"""What a TensorFlow case asserts of arrays: equality of ranks, of runs, and with the formulas."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

Array = np.ndarray[Any, Any]


def assert_ranks_equal(arrays: Iterable[Any]) -> None:
    """Every rank has the same bits. A collective."""
    mine = b"".join(np.asarray(array).tobytes() for array in arrays)
    gathered = hvd.allgather(tf.constant(list(mine), tf.uint8)[tf.newaxis]).numpy()
    different = np.flatnonzero((gathered != gathered[0]).any(1)).tolist()
    assert not different, f"ranks {different} differ from rank 0"


def ranks_equal(arrays: Iterable[Any]) -> bool:
    """Whether they do. A collective."""
    try:
        assert_ranks_equal(arrays)
    except AssertionError:
        return False
    return True


def assert_same_history(ours: list[list[Array]], theirs: list[list[Array]]) -> None:
    """Equal after every step, bitwise but for the sign of zero; and something was learned."""
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        wrong = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if not np.array_equal(x, y)]
        assert not wrong, f"step {step}: variables {wrong} differ"
    assert any(not np.array_equal(x, y) for x, y in zip(ours[0], ours[-1], strict=True))
