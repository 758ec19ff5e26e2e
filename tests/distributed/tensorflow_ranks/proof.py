"""What a TensorFlow case asserts of arrays: equality of ranks, of runs, and with the formulas."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
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


class ErrorFeedback:
    """Error feedback from its formulas, for all ranks at once; shares no code with horovod_topk.

    a = e + g;  I = the k = ceil(ratio n) largest |a|;  e = a - a[I];  the mean over ranks of a[I]
    """

    def __init__(self, ranks: int, ratio: float, *, min_numel: int = 0) -> None:
        self.ranks, self.ratio, self.min_numel = ranks, ratio, min_numel
        self.residuals: list[dict[int, Array]] = [{} for _ in range(ranks)]

    def exchange(self, gradients: Sequence[Sequence[Array]]) -> list[Array]:
        """gradients[rank][tensor] -> the mean of what is sent; updates the residuals."""
        means = []
        for position, shape in enumerate(g.shape for g in gradients[0]):
            total = np.zeros(shape, np.float32)
            for rank in range(self.ranks):
                kept = self.residuals[rank]
                owed = kept.get(position, np.float32(0)) + gradients[rank][position]
                sent = self._sent(owed)
                kept[position] = owed - sent
                total += sent
            means.append(total * np.float32(1 / self.ranks))
        return means

    def _sent(self, owed: Array) -> Array:
        k = math.ceil(Fraction(str(self.ratio)) * owed.size)
        if owed.size < self.min_numel:
            k = owed.size
        flat = owed.reshape(-1)
        keep = np.argsort(-np.abs(flat), kind="stable")[:k]
        sent = np.zeros_like(flat)
        sent[keep] = flat[keep]
        return sent.reshape(owed.shape)
