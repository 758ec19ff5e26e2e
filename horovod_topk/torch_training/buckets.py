"""A plan's buckets, and how far the gradients of each have come in this step."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from horovod_topk.core.plan import Plan
from horovod_topk.torch_training.ready import (
    ReadyGradient,
    Slot,
    any_applied,
    changed,
    first_elements,
    is_sparse,
)


class Buckets:
    """Parameters by bucket in the plan's order, buckets by parameter, and what is missing.

    Attributes:
        slots: of the parameters whose gradients are compressed, by the parameter's id: a tensor's
            hash is a call into Python. Slots keep parameters alive.
        exchanges: of buckets, so far.
    """

    def __init__(self, names: Mapping[Tensor, str]) -> None:
        self._names = names
        self.slots: dict[int, Slot] = {}
        self._slots_of: dict[int, list[Slot]] = {}  # by ordinal
        self._missing: dict[int, int] = {}  # gradients a bucket waits for, by ordinal
        self.sent: dict[int, Tensor] = {}  # what `first_elements` gave when a bucket was sent
        self.exchanges = 0  # of buckets, so far

    def index(self, plan: Plan) -> None:
        """Follow a plan; what is ready stays so."""
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
        """Those of a bucket, in the plan's order."""
        return self._slots_of[ordinal]

    def add(self, slot: Slot, gradient: Tensor, dense: Tensor) -> bool:
        """Note a gradient, and the tensor that is sent for it.

        Returns:
            Whether all gradients of its bucket are ready.

        Raises:
            ShapeChangedError, OverlappingGradientError: it is not what was planned.
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
        """The gradients of a complete bucket in the plan's order, as they were added."""
        return [slot.ready.dense for slot in self._slots_of[ordinal] if slot.ready is not None]

    def gradients(self, ordinal: int) -> list[Tensor]:
        """Those of a complete bucket in the plan's order, once it is sure that none changed.

        A loss scaler's `unscale_`, and what is written through `.data`, change no version: after
        `note_sent` the first elements are compared too, which waits for the device.

        Raises:
            GradientChangedError: one was replaced or written to.
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
        """What was ready holds the exchanged gradients now."""
        self.exchanges += 1
        self.sent.pop(ordinal, None)
        slots = self._slots_of[ordinal]
        for slot in slots:
            slot.exchanged, slot.ready = slot.ready, None
        self._missing[ordinal] = len(slots)

    def hand_out_rest(self) -> None:
        """Note gradients into which a host has copied what was exchanged, and write the others.

        DistributedDataParallel leaves out parameters that no rank has used: residuals have theirs.
        """
        for slot in self.slots.values():
            slot.hand_out()

    def note_handed_out(self) -> None:
        """`synchronize()` is over: each gradient holds what was exchanged for it."""
        for slot in self.slots.values():
            slot.note_handed_out()

    def first_changed(self) -> str | None:
        """The name of a tensor whose exchanged gradient was changed since; None: there is none."""
        return next((s.spec.name for s in self.slots.values() if s.is_changed()), None)

    def check_late(self, sent: Collection[int]) -> None:
        """Refuse before `synchronize()` sends anything, as ranks visit late ones in any order.

        sent: ordinals of the buckets that have left already.

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
        """Those whose gradient is sparse and not ready yet."""
        missing = (slot for slot in self.slots.values() if slot.ready is None)
        return [slot for slot in missing if is_sparse(slot.parameter.grad)]

    def are_applied(self) -> bool:
        """Whether the optimizer has stepped on what was exchanged; see `any_applied`."""
        return any_applied(self.slots.values())

    def forget_exchanged(self) -> None:
        """A step is over."""
        for slot in self.slots.values():
            slot.exchanged = None

    def forget(self) -> None:
        """Nothing is ready, and nothing was exchanged."""
        for slot in self.slots.values():
            slot.ready, slot.has_fired = None, False
        self._missing = {ordinal: len(slots) for ordinal, slots in self._slots_of.items()}
        self.sent.clear()
        self.forget_exchanged()


def _check_comes(slot: Slot) -> None:
    """Refuse what a parameter whose gradient is not ready would send."""
    slot.check_not_exchanged()
    gradient = slot.parameter.grad
    if gradient is None or not gradient.is_sparse:
        slot.check_matches(slot.parameter if gradient is None else gradient)
