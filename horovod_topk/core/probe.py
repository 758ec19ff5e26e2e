"""Notices a gradient that changed between its hook and `synchronize()`.

What was sent would then not be what is applied. The first elements of each gradient are remembered
when a bucket is sent and compared before its gradients are replaced. A version counter alone would
miss a loss scaler's `unscale_`, and what is written through `.data`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from horovod_topk.ops import Ops

Array = TypeVar("Array")

ELEMENTS = 16  # looked at in each gradient


class Probe(Generic[Array]):
    """The first elements of each gradient of a bucket, as they were when it was sent."""

    def __init__(self, ops: Ops[Array]) -> None:
        self._ops = ops
        self._sent: Array | None = None

    def take(self, gradients: Sequence[Array]) -> None:
        """Remember them."""
        self._sent = self._ops.peek(gradients, ELEMENTS)

    def still(self, gradients: Sequence[Array]) -> bool:
        """Whether gradients are as they were when they were taken. Waits for the device."""
        assert self._sent is not None
        return self._ops.same(self._sent, self._ops.peek(gradients, ELEMENTS))
