"""How large a residual can become.

A compressor C is a delta-contraction if ||a - C(a)||^2 <= (1 - delta) ||a||^2 for every a. Top-K
with k of n elements is one with delta = k / n: the k largest have at least that share of the
squares. With q = sqrt(1 - delta) and gradients of norm <= G then, for e' = a - C(a) and a = e + g,

    ||e'|| <= q (||e|| + ||g||)                  so that      ||e|| <= q / (1 - q) G

whatever the gradients are. Stich et al. 2018 (Lemma 3.3) and Karimireddy et al. 2019 (Lemma 3) have
it as ||e|| <= 2 / delta G and 2 sqrt(1 - delta) / delta G, of expected squares and in units of the
learning rate, which our residuals, of gradients, are not multiplied by.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator


def stich(delta: float) -> float:
    """Times G."""
    return 2 / delta


def karimireddy(delta: float) -> float:
    """Times G."""
    return 2 * math.sqrt(1 - delta) / delta


def worst_case(delta: float) -> float:
    """Times G, whatever the gradients are."""
    q = math.sqrt(1 - delta)
    return q / (1 - q)


def along(delta: float, gradients: Iterable[float]) -> Iterator[float]:
    """The same step by step, with the norms that gradients had."""
    q, bound = math.sqrt(1 - delta), 0.0
    for norm in gradients:
        bound = q * (bound + norm)
        yield bound


def contraction(before: float, after: float) -> float:
    """The delta of one step: of a and a - C(a), by their norms; 1 if there was nothing to send."""
    return 1 - (after / before) ** 2 if before else 1.0
