"""Amounts that PowerSGD (Vogels, Karimireddy, Jaggi 2019) sends and computes, for comparison.

A gradient of n x m is sent as P (n x r) and Q (m x r), allreduced one after the other. As in
PyTorch's hook (torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook), n is the first dimension
and m the product of the others; vectors, and matrices whose factors save less than half, are sent
whole, by a third allreduce.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

LEAST_SAVING = 2  # factor: `min_compression_rate` of PyTorch's hook


@dataclass(frozen=True)
class Amounts:
    """Amounts for a group of gradients."""

    elements: int  # elements that are allreduced
    multiplied: int  # multiply-adds: M Q, M^T P and P Q^T, and the orthogonalisation of P


def amounts(shapes: Iterable[tuple[int, ...]], rank: int) -> Amounts:
    """The amounts that a rank sends and computes for gradients of these shapes."""
    elements = multiplied = 0
    for shape in shapes:
        rows, columns = shape[0] if shape else 1, math.prod(shape[1:])
        thin = min(rank, rows, columns)
        if len(shape) > 1 and (rows + columns) * thin * LEAST_SAVING < rows * columns:
            elements += (rows + columns) * thin
            multiplied += 3 * rows * columns * thin + rows * thin**2
        else:
            elements += rows * columns
    return Amounts(elements, multiplied)
