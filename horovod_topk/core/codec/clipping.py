"""Clipping of local gradients, before they are added to the residual.

Clipping exchanged gradients is too late for error feedback: a gradient that is far too large is in
the residual by then, and is sent over many steps. Deep Gradient Compression (Lin et al. 2018,
section 3.2 and appendix C) clips on each rank instead. There the local gradients G of P ranks add
up to the gradient that is applied. If they are independent and of similar size, its norm is sqrt(P)
times theirs, so each of them is clipped to

    ||G|| <= clip_norm / sqrt(P)

If the average of gradients g is applied, g is P G in these units: ||g|| <= clip_norm sqrt(P). If
all ranks have the same gradient, the average can be sqrt(P) times larger than `clip_norm`.

This threshold, t, limits the norm of all gradients of a rank. A graph has all gradients before it
sends a bucket, and clips them together. With hooks they become ready bucket by bucket, and a bucket
is sent before the last gradient is ready, so that exchange and backward overlap. Bucket b, with
gradients g_b, is therefore scaled by

    c_b = min(1, t / sqrt(||g_1||^2 + ... + ||g_b||^2))

from the buckets so far, in the order in which they are complete. So gradients whose norm is within
t are never changed; a single bucket is clipped exactly; of B buckets the last one is, no bucket
exceeds t, and all together do not exceed t sqrt(B), B being a model's bytes over 25 MiB.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

Array = TypeVar("Array")
Given = TypeVar("Given", contravariant=True)


class GradientNorms(Protocol[Given]):
    """A framework's arithmetic for clipping; norms are numbers or its scalars."""

    def device(self, gradients: Sequence[Given]) -> object:
        """Return the device of gradients. Each device is clipped by its own norm."""
        ...

    def norm(self, gradients: Sequence[Given], before: Any) -> Any:
        """Euclidean norm of gradients and of earlier ones, whose norm is `before` (0.0: none)."""
        ...

    def reduce(self, gradients: Sequence[Given], threshold: float, norm: Any) -> None:
        """Scale gradients in place by min(1, threshold / norm); non-finite gradients stay so."""
        ...


class LocalClip(Generic[Array]):
    """Clips one rank's gradients, step after step.

    by_bucket: whether they are given bucket by bucket, and not all at once.
    """

    def __init__(
        self, clip_norm: float, reduction: str, norms: GradientNorms[Array], *, by_bucket: bool
    ) -> None:
        self._clip_norm, self._reduction = clip_norm, reduction
        self._norms, self._by_bucket = norms, by_bucket
        self._so_far: dict[object, Any] = {}  # norms of the buckets so far, by device
        self._threshold = clip_norm

    def begin(self, ranks: int, units: float = 1.0) -> None:
        """Begin a step; its gradients are `units` times too large, as with a loss scale."""
        self._so_far.clear()
        self._threshold = units * local_threshold(self._clip_norm, self._reduction, ranks)

    def clip(self, gradients: Sequence[Array]) -> None:
        """Scale gradients in place: those of one bucket, or all."""
        device = self._norms.device(gradients)
        before = self._so_far.get(device, 0.0) if self._by_bucket else 0.0
        norm = self._so_far[device] = self._norms.norm(gradients, before)
        self._norms.reduce(gradients, self._threshold, norm)


def local_threshold(clip_norm: float, reduction: str, ranks: int) -> float:
    """The norm that a rank's gradients are clipped to."""
    share = clip_norm / math.sqrt(ranks)
    return share * ranks if reduction == "average" else share
