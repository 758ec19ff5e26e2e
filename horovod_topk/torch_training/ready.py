"""Ready gradients, and the checks that they are unchanged until they are exchanged and applied.

Each check raises before any state has changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from horovod_topk.core.plan.buckets import TensorSpec
from horovod_topk.errors import (
    GradientChangedError,
    OverlappingGradientError,
    RepeatedSynchronizeError,
    ShapeChangedError,
)
from horovod_topk.ops.torch import DTYPES
from horovod_topk.torch_training.specs import describe, spec_of

COMPARED = 256  # elements of a gradient that are compared before and after its exchange
FEW = 4096  # elements that are searched first for one that is not 0
REPLACED = 1 << 32  # as a number of writes: the gradient is another tensor


@dataclass(slots=True)
class ReadyGradient:
    """A gradient as it was when its hook fired, or when this package last wrote to it."""

    owner: Tensor  # p.grad
    dense: Tensor  # the same, or its dense copy when sparse_as_dense
    version: int  # counts in-place writes; see torch.Tensor._version
    address: int  # memory address of `dense`: assigning to `.data` changes no version

    def note_writing(self) -> None:
        """Note that all writes to the gradient so far were this package's own."""
        self.version = self.owner._version


class Slot:
    """A parameter's place in its bucket, and the state of its gradient in this step."""

    __slots__ = ("exchanged", "has_fired", "kind", "ordinal", "parameter", "ready", "spec")

    def __init__(self, parameter: Tensor, spec: TensorSpec, ordinal: int) -> None:
        self.parameter = parameter
        self.spec = spec
        self.ordinal = ordinal  # the bucket's
        self.kind = spec.shape, DTYPES[spec.dtype], torch.device(spec.device)
        self.ready: ReadyGradient | None = None  # from the hook until the bucket is finished
        self.exchanged: ReadyGradient | None = None  # from then on until the optimizer's step
        self.has_fired = False  # whether backward has added to its gradient since the last exchange

    def is_still(self, seen: ReadyGradient) -> bool:
        """Whether the parameter's gradient is the one that was seen, not written to since."""
        gradient = self.parameter.grad
        return (
            gradient is seen.owner
            and gradient._version == seen.version
            and seen.dense.data_ptr() == seen.address
        )

    def check_matches(self, gradient: Tensor) -> None:
        """Refuse a gradient that does not fit its residual, or that cannot be written to.

        Raises:
            ShapeChangedError: the gradient has another shape, dtype or device.
            OverlappingGradientError: elements of the gradient share memory.
        """
        if (gradient.shape, gradient.dtype, gradient.device) != self.kind:
            found = spec_of(self.spec.name, gradient)
            raise ShapeChangedError(
                f"its gradient is {describe(found)}, its residual {describe(self.spec)}",
                tensor=self.spec.name,
                cure="Build the distributed optimizer after the model has its final shapes, dtype "
                "and device",
            )
        if not gradient.is_contiguous() and _overlaps(gradient):
            raise OverlappingGradientError(
                f"its gradient's strides {gradient.stride()} let elements share memory, so that "
                "the exchanged one cannot be written to it",
                tensor=self.spec.name,
                cure="Assign a gradient of its own memory, p.grad = gradient.clone()",
            )

    def note_writing(self) -> None:
        """Note that this package has written to the ready gradient."""
        if self.ready is not None:
            self.ready.note_writing()

    def note_handed_out(self) -> None:
        """Note that `synchronize()` has written the exchanged gradient to `grad`."""
        if self.exchanged is not None:
            self.exchanged.note_writing()

    def hand_out(self) -> None:
        """Note the parameter's gradient as the exchanged one; write it if backward made none."""
        p, seen = self.parameter, self.exchanged
        assert seen is not None
        if not self.has_fired and p.requires_grad and bool(torch.any(seen.dense)):
            p.grad = torch.empty_like(p).copy_(seen.dense)
        self.exchanged, self.has_fired = None, False
        if p.grad is not None:
            self.exchanged = ReadyGradient(p.grad, p.grad, p.grad._version, p.grad.data_ptr())

    def writes(self) -> int:
        """Number of times that the exchanged gradient was written to since; `REPLACED`."""
        gradient, exchanged = self.parameter.grad, self.exchanged
        if gradient is None or exchanged is None or gradient is not exchanged.owner:
            return REPLACED
        return gradient._version - exchanged.version

    def is_changed(self) -> bool:
        """Whether the exchanged gradient was changed since; clearing it does not count."""
        exchanged = self.exchanged
        return not (exchanged is None or self.parameter.grad is None or self.is_still(exchanged))

    def check_not_exchanged(self) -> None:
        """Refuse to send an exchanged gradient again: its residual would count it twice.

        Raises:
            RepeatedSynchronizeError: the gradient is the exchanged one, and not zero.
        """
        if self.exchanged is None:
            return
        gradient = self.parameter.grad
        if gradient is None or gradient is not self.exchanged.owner:
            return
        if _is_nonzero(gradient):
            raise RepeatedSynchronizeError(
                "its gradient was exchanged already and not stepped on or cleared since",
                tensor=self.spec.name,
                cure="Call zero_grad() before the next backward(). With Horovod, step inside "
                "optimizer.skip_synchronize() after optimizer.synchronize(), and accumulate with "
                "backward_passes_per_step; with DistributedDataParallel, inside no_sync()",
            )


def changed(slot: Slot) -> GradientChangedError:
    """The error for a gradient that was changed or replaced after it was ready."""
    return GradientChangedError(
        "its gradient was modified or replaced between backward() and synchronize()",
        tensor=slot.spec.name,
        cure="Clip, unscale or edit gradients after optimizer.synchronize(), then step "
        "inside optimizer.skip_synchronize()",
    )


def first_elements(gradients: Sequence[Tensor], most: int = COMPARED) -> Tensor:
    """The first elements of each gradient in row-major order, `most` at most, concatenated.

    The result has a dtype that holds all of them exactly.
    """
    return torch.cat(
        [
            g.as_strided((min(most, g.numel()),), (1,))
            if g.is_contiguous()
            else g.reshape(-1)[:most]
            for g in gradients
        ]
    )


def is_untouched(slot: Slot) -> bool:
    """Whether a slot's exchanged gradient is still there, without a write that PyTorch counts."""
    gradient, exchanged = slot.parameter.grad, slot.exchanged
    assert exchanged is not None
    return gradient is exchanged.owner and gradient._version == exchanged.version


def zeroed(slots: Sequence[Slot]) -> set[Slot]:
    """Slots whose exchanged gradients, which were not 0, are zeros now.

    Only gradients that were written to more often than others are looked at, as clipping writes
    once to each; or all, if each was written to. Waits for the device if there are any.
    """
    writes = {slot: slot.writes() for slot in slots}
    least = min(writes.values(), default=0)
    if least and not any(_is_nonzero(slot.parameter.grad) for slot in slots):
        return set(slots)
    odd = [slot for slot, count in writes.items() if count > least]
    if not odd:
        return set()
    elements = [_elements(slot.parameter.grad) for slot in odd]
    flags = torch.stack([torch.any(each).to(elements[0].device) for each in elements])
    return {slot for slot, has_any in zip(odd, flags.tolist(), strict=True) if not has_any}


def any_applied(slots: Iterable[Slot]) -> bool:
    """Whether a step that begins applies exchanged gradients, or what a user has made of them.

    False where gradients were cleared, or replaced by the zeros on which
    `hvd.broadcast_optimizer_state` steps.
    """
    exchanged = [slot for slot in slots if slot.exchanged is not None]
    if any(s.exchanged and s.parameter.grad is s.exchanged.owner for s in exchanged):
        return True
    found = (slot.parameter.grad for slot in exchanged)
    return any(_is_nonzero(gradient) for gradient in found if gradient is not None)


def is_sparse(gradient: Tensor | None) -> bool:
    """Whether there is a gradient, and it is sparse."""
    return gradient is not None and gradient.is_sparse


def _is_nonzero(gradient: Any) -> bool:
    elements = _elements(gradient)
    few = elements.reshape(-1)[:FEW] if elements.is_contiguous() else elements[:1]
    return bool(torch.any(few)) or bool(torch.any(elements))


def _elements(gradient: Any) -> Tensor:
    """All elements of a gradient that can be other than 0."""
    elements: Tensor = gradient._values() if gradient.is_sparse else gradient
    return elements


def _overlaps(tensor: Tensor) -> bool:
    """Whether elements of a tensor share memory: a stride is too small for the inner dimensions."""
    reach = 0  # elements that dimensions with smaller strides span
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False
