"""Clipping of local gradients, before they are added to the residual.

Clipping what was exchanged comes too late for error feedback: a gradient that is far too large has
gone into the residual by then, and comes back for many steps. Deep Gradient Compression (Lin et al.
2018, section 3.2 and appendix C) clips on each rank instead. There the local gradients G of P ranks
add up to the one that is applied. If they are independent and of like size, its norm is sqrt(P)
times theirs, so each of them is clipped to

    ||G|| <= clip_norm / sqrt(P)

A gradient g of which the average is applied is P G in these units: ||g|| <= clip_norm sqrt(P). Of
ranks that all have the same gradient the average can be larger than `clip_norm`, by sqrt(P).

That norm, t, is of all of a rank's gradients. A graph has them all before it sends a bucket, and
clips them together. Hooks bring them bucket by bucket, and a bucket is sent before the last
gradient is there: waiting for it would leave nothing to do while backward goes on. Bucket b, with
gradients g_b, is therefore scaled by

    c_b = min(1, t / sqrt(||g_1||^2 + ... + ||g_b||^2))

from those that are there, in the order in which buckets are complete. So gradients whose norm is
within t are never changed; one bucket is clipped exactly; of B buckets the last one is, no bucket
exceeds t, and all together do not exceed t sqrt(B), B being a model's bytes over 25 MiB.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

Array = TypeVar("Array")
Given = TypeVar("Given", contravariant=True)


class Scope(enum.Enum):
    """The gradients whose norm limits those that are clipped now."""

    SO_FAR = "the buckets so far, this one included"
    ALL = "all gradients, which are given at once"


class Norms(Protocol[Given]):
    """Arithmetic of one framework; norms are numbers or scalars of its own."""

    def place(self, gradients: Sequence[Given]) -> object:
        """Where norms are added up: those in different places do not hear of each other."""
        ...

    def norm(self, gradients: Sequence[Given], before: Any) -> Any:
        """Euclidean norm of gradients, together with those whose norm is `before` (0.0: none)."""
        ...

    def reduce(self, gradients: Sequence[Given], threshold: float, norm: Any) -> None:
        """Scale gradients in place by min(1, threshold / norm); what is not finite stays so."""
        ...


class LocalClip(Generic[Array]):
    """Clips one rank's gradients, step after step.

    Args:
        clip_norm: the norm of what is applied.
        reduction: "average" or "sum" over ranks.
        scope: whose norm counts.
        norms: of the framework.
    """

    def __init__(self, clip_norm: float, reduction: str, scope: Scope, norms: Norms[Array]) -> None:
        self._clip_norm, self._reduction = clip_norm, reduction
        self._scope, self._norms = scope, norms
        self._so_far: dict[object, Any] = {}  # norms by their place
        self._threshold = clip_norm

    def begin(self, ranks: int, units: float = 1.0) -> None:
        """A step's first gradients are about to come, so many times too large."""
        self._so_far.clear()
        self._threshold = units * local_threshold(self._clip_norm, self._reduction, ranks)

    def clip(self, gradients: Sequence[Array]) -> None:
        """Scale gradients in place: those of one bucket, or all, as the scope says."""
        place = self._norms.place(gradients)
        before = self._so_far.get(place, 0.0) if self._scope is Scope.SO_FAR else 0.0
        norm = self._so_far[place] = self._norms.norm(gradients, before)
        self._norms.reduce(gradients, self._threshold, norm)


def local_threshold(clip_norm: float, reduction: str, ranks: int) -> float:
    """The norm that a rank's gradients are clipped to.

    Args:
        clip_norm: that of what is applied.
        reduction: "average" or "sum" over ranks.
        ranks: how many exchange.
    """
    share = clip_norm / math.sqrt(ranks)
    return share * ranks if reduction == "average" else share
