"""Gradients as their hooks saw them, and what must still be true of them afterwards.

What is applied has to be what was exchanged: each check raises before anything has changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from horovod_topk.core.plan import TensorSpec
from horovod_topk.errors import (
    GradientChangedError,
    RepeatedSynchronizeError,
    ShapeChangedError,
)
from horovod_topk.ops.torch import DTYPES
from horovod_topk.torch.planning import describe, spec_of


@dataclass(frozen=True)
class Arrival:
    """A gradient as it was when its hook fired."""

    owner: Tensor  # p.grad
    dense: Tensor  # the same, or its dense copy when sparse_as_dense
    version: int  # counts in-place writes; see torch.Tensor._version
    address: int  # of `dense`: assigning to `.data` changes no version

    def is_still(self, gradient: Tensor | None) -> bool:
        """Whether `gradient` is this one, not written to since."""
        return (
            gradient is self.owner
            and gradient._version == self.version
            and self.dense.data_ptr() == self.address
        )


def check_matches(name: str, gradient: Tensor, planned: TensorSpec) -> None:
    """Refuse a gradient of another shape, dtype or device than its residual's.

    Raises:
        ShapeChangedError: it is one.
    """
    if (
        gradient.shape != planned.shape
        or gradient.dtype is not DTYPES[planned.dtype]
        or str(gradient.device) != planned.device
    ):
        found = spec_of(name, gradient)
        raise ShapeChangedError(
            f"its gradient is {describe(found)}, its residual {describe(planned)}",
            tensor=name,
            cure="Build the distributed optimizer after the model has its final shapes, dtype and "
            "device",
        )


def check_unchanged(arrivals: Mapping[Tensor, Arrival], names: Mapping[Tensor, str]) -> None:
    """Refuse gradients that are not those that arrived.

    Raises:
        GradientChangedError: one was replaced or written to.
    """
    for p, arrival in arrivals.items():
        if not arrival.is_still(p.grad):
            raise GradientChangedError(
                "its gradient was modified or replaced between backward() and synchronize()",
                tensor=names[p],
                cure="Clip, unscale or edit gradients after optimizer.synchronize(), then step "
                "inside optimizer.skip_synchronize()",
            )


def check_not_exchanged(name: str, gradient: Tensor | None, exchanged: Arrival | None) -> None:
    """Refuse to send what was received: error feedback would count it twice.

    Raises:
        RepeatedSynchronizeError: the gradient is the exchanged one, and not zero.
    """
    if gradient is None or exchanged is None or gradient is not exchanged.owner:
        return
    if torch.any(gradient._values() if gradient.is_sparse else gradient):
        raise RepeatedSynchronizeError(
            "its gradient was exchanged already and not stepped on or cleared since",
            tensor=name,
            cure="Step inside optimizer.skip_synchronize() after optimizer.synchronize(), call "
            "zero_grad() before the next backward(), and accumulate with backward_passes_per_step",
        )
