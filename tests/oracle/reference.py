"""The algorithm once more: dense, one tensor, from the formulas of Stich 2018 alone.

    a = e + g;  I = the k = ceil(ratio n) largest |a|;  e' = a - D(a[I]);  g' = sum_r D(a_r[I_r])

Shares no code with `horovod_topk`, plans no bytes and knows no payloads.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Reference:
    """P ranks' error feedback for one tensor of n elements."""

    def __init__(self, ranks: int, n: int, ratio: str, sent_as: type[np.floating[Any]]) -> None:
        self.residual = np.zeros((ranks, n), np.float32)
        self._k = math.ceil(Decimal(ratio) * n)
        self._sent_as = sent_as

    def step(self, gradients: NDArray[Any]) -> NDArray[Any]:
        """One step: float32 gradients [P, n] in, their compressed sum over ranks [n] out."""
        compensated = self.residual + gradients
        decoded = np.zeros_like(compensated)
        for sent, a in zip(decoded, compensated, strict=True):
            by_magnitude = np.lexsort((np.arange(a.size), -np.abs(a)))
            chosen = by_magnitude[: self._k]
            sent[chosen] = a[chosen].astype(self._sent_as)
        self.residual = compensated - decoded
        total = np.zeros_like(gradients[0])
        for sent in decoded:
            total = total + sent
        return total
