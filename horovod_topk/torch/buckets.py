"""A plan's buckets, and how far the gradients of each have come in this step."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from horovod_topk.core.plan import Plan
from horovod_topk.torch.ready import ReadyGradient, Slot, any_applied, check_unchanged, is_sparse


class Buckets:
    """Parameters by bucket in the plan's order, buckets by parameter, and what is missing."""

    def __init__(self, names: Mapping[Tensor, str]) -> None:
        self._names = names
        # Found by id, as a tensor's hash is a call into Python; slots keep parameters alive.
        self._slots: dict[int, Slot] = {}
        self._slots_of: dict[int, list[Slot]] = {}  # by ordinal
        self._missing: dict[int, int] = {}  # gradients a bucket waits for, by ordinal
        self.exchanges = 0  # of buckets, so far

    def index(self, plan: Plan) -> None:
        """Follow a plan; what is ready stays so."""
        by_name = {name: p for p, name in self._names.items()}
        known, self._slots, self._slots_of = self._slots, {}, {}
        for bucket in plan.buckets:
            own = self._slots_of[bucket.ordinal] = []
            for tensor in bucket.tensors:
                p = by_name[tensor.spec.name]
                slot = known.get(id(p)) or Slot(p, tensor.spec, bucket.ordinal)
                self._slots[id(p)] = slot
                own.append(slot)
        self._missing = {
            i: sum(slot.ready is None for slot in slots) for i, slots in self._slots_of.items()
        }

    def __contains__(self, ordinal: int) -> bool:
        """Whether the plan has this bucket."""
        return ordinal in self._slots_of

    def slot(self, parameter: int) -> Slot | None:
        """A parameter's, by its id; None where its gradient is not compressed."""
        return self._slots.get(parameter)

    def slots_of(self, ordinal: int) -> list[Slot]:
        """Those of a bucket, in the plan's order."""
        return self._slots_of[ordinal]

    def add(self, slot: Slot, gradient: Tensor, dense: Tensor) -> None:
        """Note a gradient, and the tensor that is sent for it.

        Raises:
            ShapeChangedError, OverlappingGradientError: it is not what was planned.
        """
        slot.check_matches(dense)
        self._missing[slot.ordinal] -= slot.ready is None
        slot.ready = ReadyGradient(gradient, dense, gradient._version, dense.data_ptr())

    def is_complete(self, ordinal: int) -> bool:
        """Whether all gradients of a bucket are ready."""
        return not self._missing[ordinal]

    def gradients(self, ordinal: int) -> list[Tensor]:
        """Those of a complete bucket in the plan's order, once it is sure that none changed.

        Raises:
            GradientChangedError: one did.
        """
        slots = self._slots_of[ordinal]
        check_unchanged(slots)
        return [slot.ready.dense for slot in slots if slot.ready]

    def note_exchanged(self, ordinal: int) -> None:
        """What was ready holds the exchanged gradients now."""
        self.exchanges += 1
        slots = self._slots_of[ordinal]
        for slot in slots:
            slot.exchanged, slot.ready = slot.ready, None
        self._missing[ordinal] = len(slots)

    def note_handed_out(self) -> None:
        """`synchronize()` is over: each gradient holds what was exchanged for it."""
        for slot in self._slots.values():
            slot.note_handed_out()

    def first_changed(self) -> str | None:
        """The name of a tensor whose exchanged gradient was changed since; None: there is none."""
        return next((s.spec.name for s in self._slots.values() if s.is_changed()), None)

    def check_late(self, is_sent: Callable[[int], bool]) -> None:
        """Refuse before `synchronize()` sends anything, as ranks visit late ones in any order.

        is_sent: whether a bucket has left already, by its ordinal.

        Raises:
            GradientChangedError, RepeatedSynchronizeError, ShapeChangedError,
            OverlappingGradientError.
        """
        for ordinal, slots in self._slots_of.items():
            if is_sent(ordinal):
                continue
            check_unchanged(slots)
            for slot in slots:
                if slot.ready is None:
                    _check_comes(slot)

    def late_sparse(self) -> list[Slot]:
        """Those whose gradient is sparse and not ready yet."""
        missing = (slot for slot in self._slots.values() if slot.ready is None)
        return [slot for slot in missing if is_sparse(slot.parameter.grad)]

    def are_applied(self) -> bool:
        """Whether the optimizer has stepped on what was exchanged; see `any_applied`."""
        return any_applied(self._slots.values())

    def forget_exchanged(self) -> None:
        """A step is over."""
        for slot in self._slots.values():
            slot.exchanged = None

    def forget(self) -> None:
        """Nothing is ready, and nothing was exchanged."""
        for slot in self._slots.values():
            slot.ready = None
        self._missing = {ordinal: len(slots) for ordinal, slots in self._slots_of.items()}
        self.forget_exchanged()


def _check_comes(slot: Slot) -> None:
    """Refuse what a parameter whose gradient is not ready would send."""
    slot.check_not_exchanged()
    gradient = slot.parameter.grad
    if gradient is None or not gradient.is_sparse:
        slot.check_matches(slot.parameter if gradient is None else gradient)
