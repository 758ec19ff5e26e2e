"""Clipping of local gradients, before they are added to the residual.

Clipping what was exchanged comes too late for error feedback: a gradient that is far too large has
gone into the residual by then, and comes back for many steps. Deep Gradient Compression (Lin et al.
2018, section 3.2 and appendix C) clips on each rank instead. There the local gradients G of P ranks
add up to the one that is applied. If they are independent and of like size, its norm is sqrt(P)
times theirs, so each of them is clipped to

    ||G|| <= clip_norm / sqrt(P)

A gradient g of which the average is applied is P G in these units: ||g|| <= clip_norm sqrt(P). Of
ranks that all have the same gradient the average can be larger than `clip_norm`, by sqrt(P).
"""

from __future__ import annotations

import math


def local_threshold(clip_norm: float, reduction: str, ranks: int) -> float:
    """The norm that a rank's gradients are clipped to.

    Args:
        clip_norm: that of what is applied.
        reduction: "average" or "sum" over ranks.
        ranks: how many exchange.
    """
    share = clip_norm / math.sqrt(ranks)
    return share * ranks if reduction == "average" else share
