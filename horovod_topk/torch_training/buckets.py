"""The plan's buckets, and which of their gradients are ready, sent or exchanged in this step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from horovod_topk.core.plan.buckets import Plan
from horovod_topk.torch_training.ready import (
    ReadyGradient,
    Slot,
    any_applied,
    changed,
    first_elements,
    is_sparse,
    is_untouched,
    zeroed,
)
from horovod_topk.torch_training.stepping import moved_by


@dataclass(frozen=True)
class Use:
    """What a step of the optimizer uses of the exchanged gradients, by tensor name."""

    without: Collection[str]  # gradients that it does not use
    frozen: Collection[str]  # gradients that it uses at a learning rate of 0


class Buckets:
    """The slots of each bucket in the plan's order, and how many gradients each waits for.

    Attributes:
        slots: by the id of each parameter whose gradient is compressed: a tensor's hash is a call
            into Python. Slots keep parameters alive.
        sent: the result of `first_elements` for each bucket that was sent, by ordinal.
        exchanges: buckets exchanged so far.
    """

    def __init__(self, names: Mapping[Tensor, str]) -> None:
        self._names = names
        self.slots: dict[int, Slot] = {}
        self._slots_of: dict[int, list[Slot]] = {}  # by ordinal
        self._missing: dict[int, int] = {}  # gradients a bucket waits for, by ordinal
        self.sent: dict[int, Tensor] = {}
        self.exchanges = 0

    def index(self, plan: Plan) -> None:
        """Assign slots to the buckets of a plan; ready gradients stay ready."""
        by_name = {name: p for p, name in self._names.items()}
        known, self.slots, self._slots_of = self.slots, {}, {}
        for bucket in plan.buckets:
            own = self._slots_of[bucket.ordinal] = []
            for tensor in bucket.tensors:
                p = by_name[tensor.spec.name]
                slot = known.get(id(p)) or Slot(p, tensor.spec, bucket.ordinal)
                self.slots[id(p)] = slot
                own.append(slot)
        self._missing = {
            i: sum(slot.ready is None for slot in slots) for i, slots in self._slots_of.items()
        }

    def __contains__(self, ordinal: int) -> bool:
        """Whether the plan has this bucket."""
        return ordinal in self._slots_of

    def slots_of(self, ordinal: int) -> list[Slot]:
        """The slots of a bucket, in the plan's order."""
        return self._slots_of[ordinal]

    def add(self, slot: Slot, gradient: Tensor, dense: Tensor) -> bool:
        """Note a ready gradient, and the dense tensor that is sent for it.

        Returns:
            Whether all gradients of its bucket are ready.

        Raises:
            ShapeChangedError, OverlappingGradientError: the gradient does not fit the plan.
        """
        kind = dense.shape, dense.dtype, dense.device
        if kind != slot.kind or not dense.is_contiguous():
            slot.check_matches(dense)
        self._missing[slot.ordinal] -= slot.ready is None
        slot.ready = ReadyGradient(gradient, dense, gradient._version, dense.data_ptr())
        return not self._missing[slot.ordinal]

    def is_complete(self, ordinal: int) -> bool:
        """Whether all gradients of a bucket are ready."""
        return not self._missing[ordinal]

    def ready(self, ordinal: int) -> list[Tensor]:
        """Ready gradients of a complete bucket in the plan's order, as they were added."""
        return [slot.ready.dense for slot in self._slots_of[ordinal] if slot.ready is not None]

    def gradients(self, ordinal: int) -> list[Tensor]:
        """Ready gradients of a complete bucket in the plan's order, checked to be unchanged.

        GradScaler's `unscale_` and writes through `.data` do not change a tensor's version. So the
        first elements of a sent bucket are compared too, which waits for the device.

        Raises:
            GradientChangedError: a gradient was replaced or written to.
        """
        found = []
        for slot in self._slots_of[ordinal]:
            assert slot.ready is not None  # the bucket is complete
            if not slot.is_still(slot.ready):
                raise changed(slot)
            found.append(slot.ready.dense)
        if ordinal in self.sent:
            sent, now = self.sent[ordinal], first_elements(found)
            if not ((sent == now) | (sent.isnan() & now.isnan())).all():
                raise changed(self._slots_of[ordinal][0])
        return found

    def note_exchanged(self, ordinal: int) -> None:
        """Note that a bucket's ready gradients hold exchanged values now."""
        self.exchanges += 1
        self.sent.pop(ordinal, None)
        slots = self._slots_of[ordinal]
        for slot in slots:
            slot.exchanged, slot.ready = slot.ready, None
        self._missing[ordinal] = len(slots)

    def hand_out_rest(self) -> None:
        """Note the gradients that DDP has written, and write those of parameters that DDP left out.

        DistributedDataParallel leaves out parameters that no rank has used in this step; their
        residuals may still have sent something.
        """
        for slot in self.slots.values():
            slot.hand_out()

    def note_handed_out(self) -> None:
        """Note that `synchronize()` has written the exchanged gradients."""
        for slot in self.slots.values():
            slot.note_handed_out()

    def first_changed(self) -> str | None:
        """The first tensor whose exchanged gradient was changed since, by name; None: none was."""
        return next((s.spec.name for s in self.slots.values() if s.is_changed()), None)

    def check_late(self, sent: Collection[int]) -> None:
        """Check all late gradients before any is sent, as ranks visit them in different orders.

        sent: ordinals of the buckets that were sent already.

        Raises:
            GradientChangedError, RepeatedSynchronizeError, ShapeChangedError,
            OverlappingGradientError.
        """
        for ordinal, slots in self._slots_of.items():
            if ordinal in sent:
                continue
            for slot in slots:
                if slot.ready is None:
                    _check_comes(slot)
                elif not slot.is_still(slot.ready):
                    raise changed(slot)

    def late_sparse(self) -> list[Slot]:
        """Slots whose gradient is sparse and not ready yet."""
        missing = (slot for slot in self.slots.values() if slot.ready is None)
        return [slot for slot in missing if is_sparse(slot.parameter.grad)]

    def use_of(self, optimizer: Any, *, with_zeros: bool) -> Use | None:
        """What a step that begins uses of the exchanged gradients; None: none of them.

        with_zeros: whether ranks may have exchanged zeros. Else zeros were written since.
        """
        exchanged = [slot for slot in self.slots.values() if slot.exchanged is not None]
        if not any_applied(exchanged):
            return None
        moves = {id(p): moves for p, moves in moved_by(optimizer)}
        gone = {slot for slot in exchanged if id(slot.parameter) not in moves}
        if not all(map(is_untouched, exchanged)):
            gone |= {slot for slot in exchanged if slot.parameter.grad is None}
            gone |= set() if with_zeros else zeroed([s for s in exchanged if s not in gone])
        if len(gone) == len(exchanged):
            return None
        frozen: set[str] = set()
        if not all(moves.values()):
            found = (slot for slot in exchanged if slot not in gone)
            frozen = {slot.spec.name for slot in found if not moves[id(slot.parameter)]}
        return Use({slot.spec.name for slot in gone}, frozen)

    def forget_exchanged(self) -> None:
        """Forget the exchanged gradients, once a step is over."""
        for slot in self.slots.values():
            slot.exchanged = None

    def forget(self) -> None:
        """Forget all ready and exchanged gradients."""
        for slot in self.slots.values():
            slot.ready, slot.has_fired = None, False
        self._missing = {ordinal: len(slots) for ordinal, slots in self._slots_of.items()}
        self.sent.clear()
        self.forget_exchanged()


def _check_comes(slot: Slot) -> None:
    """Check the late gradient that a parameter would send."""
    slot.check_not_exchanged()
    gradient = slot.parameter.grad
    if gradient is None or not gradient.is_sparse:
        slot.check_matches(slot.parameter if gradient is None else gradient)
