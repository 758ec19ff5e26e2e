"""Gradients that are compressed: the buckets they are sent in, and how far each is in this step.

A gradient is ready when its hook has fired, is sent with its bucket, and is exchanged until the
optimizer's step. Checks see to it that it stays unchanged meanwhile; each raises before any state
has changed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from horovod_topk.core.plan.buckets import Plan, TensorSpec, make_plan
from horovod_topk.errors import (
    GradientChangedError,
    OverlappingGradientError,
    RepeatedSynchronizeError,
    ShapeChangedError,
)
from horovod_topk.methods.protocol import Method
from horovod_topk.ops.torch import DTYPES
from horovod_topk.torch_training.optimizer_settings import moved_by

COMPARED = 256  # elements of a gradient that are compared before and after its exchange
FEW = 4096  # elements that are searched first for one that is not 0
REPLACED = 1 << 32  # as a number of writes: the gradient is another tensor

ACCUMULATE = (
    "Call zero_grad() before the next backward(). With Horovod, step inside "
    "optimizer.skip_synchronize() after optimizer.synchronize(), and accumulate with "
    "backward_passes_per_step; with DistributedDataParallel, inside no_sync()"
)


def plan_of(
    optimizer: Any,
    names: Mapping[Tensor, str],
    config: Method,
    reduction: str,
    groups: Iterable[Sequence[Tensor]],
) -> Plan:
    """Plan the buckets: the user's groups, then default ones in the order of the backward pass.

    groups: lists of parameters; parameters that are not trained are left out.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    specs = {p: spec_of(names[p], p) for p in reversed(parameters) if p.requires_grad}
    asked = [[specs[p] for p in group if p in specs] for group in groups]
    planned = list(specs.values()), config, reduction, [group for group in asked if group]
    return make_plan(*planned, names.values())


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    """The core's description of this rank's part of a parameter or gradient."""
    own = local(tensor)
    dtype = str(own.dtype).removeprefix("torch.")
    return TensorSpec(name, tuple(own.shape), dtype, str(own.device))


def local(tensor: Any) -> Any:
    """This rank's part of a `torch.distributed.tensor.DTensor`; other objects as they are."""
    return getattr(tensor, "_local_tensor", tensor)


def part_of(parameter: Any) -> str:
    """Which shard of a `DTensor` this rank has, for names of files; empty: all of it."""
    mesh: Any = getattr(parameter, "device_mesh", None)
    is_whole = mesh is None or mesh.size() == 1
    return "" if is_whole else f".{mesh.get_local_rank()}of{mesh.size()}"


@dataclass(slots=True)
class ReadyGradient:
    """A gradient as it was when its hook fired, or when this package last wrote to it."""

    owner: Tensor  # p.grad
    dense: Tensor  # the same, this rank's part of it, or its dense copy when sparse_as_dense
    version: int  # counts in-place writes; see torch.Tensor._version
    address: int  # memory address of `dense`: assigning to `.data` changes no version

    def note_writing(self) -> None:
        """Note that all writes to the gradient so far were this package's own."""
        self.version = self.owner._version


def ready(gradient: Tensor) -> ReadyGradient:
    """Note a gradient as it is now."""
    own = local(gradient)
    return ReadyGradient(gradient, own, gradient._version, own.data_ptr())


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

    @property
    def gradient(self) -> Tensor | None:
        """This rank's part of the parameter's gradient."""
        found: Tensor | None = local(self.parameter.grad)
        return found

    def is_still(self, seen: ReadyGradient) -> bool:
        """Whether the parameter's gradient is the one that was seen, not written to since."""
        gradient = self.parameter.grad
        return (
            gradient is seen.owner
            and gradient._version == seen.version
            and seen.dense.data_ptr() == seen.address
        )

    def check_matches(self, gradient: Tensor) -> None:
        """Refuse a gradient that does not fit its residual, or that cannot be written to."""
        if (gradient.shape, gradient.dtype, gradient.device) != self.kind:
            found = _described(spec_of(self.spec.name, gradient))
            raise ShapeChangedError(
                f"its gradient is {found}, its residual {_described(self.spec)}",
                tensor=self.spec.name,
                cure="Build the distributed optimizer, or wrap the model, after it has its final "
                "shapes, dtype and device",
            )
        if not gradient.is_contiguous() and _overlaps(gradient):
            raise OverlappingGradientError(
                f"its gradient's strides {gradient.stride()} let elements share memory, so that "
                "the exchanged one cannot be written to it",
                tensor=self.spec.name,
                cure="Assign a gradient of its own memory, p.grad = gradient.clone()",
            )

    def hand_out(self, *, zeros: bool = False) -> None:
        """Note the parameter's gradient as the exchanged one; write it if backward made none.

        zeros: write it also if it is 0.
        """
        p, seen = self.parameter, self.exchanged
        assert seen is not None
        if not self.has_fired and p.requires_grad and (zeros or bool(torch.any(seen.dense))):
            p.grad = torch.empty_like(p)
            local(p.grad).copy_(seen.dense)
        self.exchanged, self.has_fired = None, False
        if p.grad is not None:
            self.exchanged = ready(p.grad)

    def present(self) -> tuple[Any, int]:
        """As in `Buckets.present`."""
        gradient = self.parameter.grad
        if gradient is None:
            return 0, 0
        is_view = (
            self.exchanged is not None and local(gradient).data_ptr() == self.exchanged.address
        )
        return object() if is_view and gradient.numel() else id(gradient), gradient._version

    def writes(self) -> int:
        """Number of times that the exchanged gradient was written to since; `REPLACED`."""
        gradient, exchanged = self.parameter.grad, self.exchanged
        if gradient is None or exchanged is None or gradient is not exchanged.owner:
            return REPLACED
        return gradient._version - exchanged.version

    def check_not_exchanged(self, cure: str = ACCUMULATE) -> None:
        """Refuse to send an exchanged gradient again: its residual would count it twice."""
        if self.waits():
            raise RepeatedSynchronizeError(
                "its gradient was exchanged already and not stepped on or cleared since",
                tensor=self.spec.name,
                cure=cure,
            )

    def waits(self) -> bool:
        """Whether the parameter's gradient is the exchanged one, which no step has applied yet.

        A gradient of zeros does not count: there may be nothing to apply.
        """
        exchanged = self.exchanged
        if exchanged is None or self.parameter.grad is not exchanged.owner:
            return False
        return _is_nonzero(self.gradient)


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
        slots_of: the slots of each bucket, by ordinal, in the plan's order.
        sent: the result of `first_elements` for each bucket that was sent, by ordinal.
        exchanges: buckets exchanged so far.
    """

    def __init__(self, names: Mapping[Tensor, str], plan: Plan) -> None:
        self._names = names
        self.slots: dict[int, Slot] = {}
        self.sent: dict[int, Tensor] = {}
        self.exchanges = 0
        self.index(plan)

    def index(self, plan: Plan) -> None:
        """Assign slots to the buckets of a plan; ready gradients stay ready."""
        by_name = {name: p for p, name in self._names.items()}
        known, self.slots = self.slots, {}
        self.slots_of = dict[int, list[Slot]]()
        for bucket in plan.buckets:
            own = self.slots_of[bucket.ordinal] = []
            for tensor in bucket.tensors:
                p = by_name[tensor.spec.name]
                slot = known.get(id(p)) or Slot(p, tensor.spec, bucket.ordinal)
                self.slots[id(p)] = slot
                own.append(slot)
        self._missing = {
            i: sum(slot.ready is None for slot in slots) for i, slots in self.slots_of.items()
        }

    def add(self, slot: Slot, gradient: Tensor, dense: Tensor) -> bool:
        """Note a ready gradient, and what is sent for it; return whether its bucket is complete."""
        kind = dense.shape, dense.dtype, dense.device
        if kind != slot.kind or not dense.is_contiguous():
            slot.check_matches(dense)
        self._missing[slot.ordinal] -= slot.ready is None
        slot.ready = ReadyGradient(gradient, dense, gradient._version, dense.data_ptr())
        return not self._missing[slot.ordinal]

    def is_complete(self, ordinal: int) -> bool:
        """Whether the plan has this bucket, and all of its gradients are ready."""
        return self._missing.get(ordinal) == 0

    def ready(self, ordinal: int) -> list[Tensor]:
        """Ready gradients of a complete bucket in the plan's order, as they were added."""
        return [slot.ready.dense for slot in self.slots_of[ordinal] if slot.ready is not None]

    def gradients(self, ordinal: int) -> list[Tensor]:
        """Ready gradients of a complete bucket in the plan's order, checked to be unchanged.

        GradScaler's `unscale_` and writes through `.data` do not change a tensor's version. So the
        first elements of a sent bucket are compared too, which waits for the device.
        """
        found = []
        for slot in self.slots_of[ordinal]:
            assert slot.ready is not None  # the bucket is complete
            if not slot.is_still(slot.ready):
                raise _changed(slot)
            found.append(slot.ready.dense)
        if ordinal in self.sent:
            sent, now = self.sent[ordinal], first_elements(found)
            if not ((sent == now) | (sent.isnan() & now.isnan())).all():
                raise _changed(self.slots_of[ordinal][0])
        return found

    def note_exchanged(self, ordinal: int) -> None:
        """Note that a bucket's ready gradients hold exchanged values now."""
        self.exchanges += 1
        self.sent.pop(ordinal, None)
        slots = self.slots_of[ordinal]
        for slot in slots:
            slot.exchanged, slot.ready = slot.ready, None
        self._missing[ordinal] = len(slots)

    def note_handed_out(self) -> None:
        """Note that `synchronize()` has written the exchanged gradients."""
        for slot in self.slots.values():
            if slot.exchanged is not None:
                slot.exchanged.note_writing()

    def waits(self) -> bool:
        """Whether exchanged gradients, which are not 0, wait for the optimizer's step."""
        return any(slot.waits() for slot in self.slots.values() if slot.exchanged is not None)

    def has_fired(self) -> bool:
        """Whether backward has added to any gradient since the last exchange."""
        return any(slot.has_fired for slot in self.slots.values())

    def present(self) -> list[tuple[Any, int]]:
        """Identity and version of each parameter's gradient, to see whether one was written.

        A gradient that lies in the exchanged memory differs from itself: it is always written.
        """
        return [slot.present() for slot in self.slots.values()]

    def first_changed(self) -> str | None:
        """The first tensor whose exchanged gradient was changed since, by name; None: none was.

        Clearing a gradient does not count.
        """
        kept = (slot for slot in self.slots.values() if slot.parameter.grad is not None)
        changed = (slot for slot in kept if slot.exchanged and not slot.is_still(slot.exchanged))
        return next((slot.spec.name for slot in changed), None)

    def check_late(self, sent: Collection[int]) -> None:
        """Check all late gradients before any is sent, as ranks visit them in different orders."""
        for slot in self.slots.values():
            if slot.ordinal in sent:
                continue
            if slot.ready is not None:
                if not slot.is_still(slot.ready):
                    raise _changed(slot)
                continue
            slot.check_not_exchanged()
            gradient = slot.gradient
            if gradient is None or not gradient.is_sparse:
                slot.check_matches(slot.parameter if gradient is None else gradient)

    def use_of(self, optimizer: Any, *, with_zeros: bool) -> Use | None:
        """What a step that begins uses of the exchanged gradients; None: none of them.

        with_zeros: whether ranks may have exchanged zeros. Else zeros were written since.
        """
        exchanged = [slot for slot in self.slots.values() if slot.exchanged is not None]
        if not any_applied(exchanged):
            return None
        moves = {id(p): moves for p, moves in moved_by(optimizer)}
        gone = {slot for slot in exchanged if id(slot.parameter) not in moves}
        if any(slot.writes() for slot in exchanged):
            gone |= {slot for slot in exchanged if slot.parameter.grad is None}
            gone |= set() if with_zeros else _zeroed([s for s in exchanged if s not in gone])
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
            slot.ready = slot.exchanged = None
            slot.has_fired = False
        self._missing = {ordinal: len(slots) for ordinal, slots in self.slots_of.items()}
        self.sent.clear()


def first_elements(gradients: Sequence[Tensor]) -> Tensor:
    """The first elements of each gradient in row-major order, `COMPARED` at most, concatenated.

    The result has a dtype that holds all of them exactly.
    """
    return torch.cat(
        [
            g.as_strided((min(COMPARED, g.numel()),), (1,))
            if g.is_contiguous()
            else g.reshape(-1)[:COMPARED]
            for g in gradients
        ]
    )


def any_applied(slots: Iterable[Slot]) -> bool:
    """Whether a step that begins applies exchanged gradients, or what a user has made of them.

    False where gradients were cleared, or replaced by the zeros on which
    `hvd.broadcast_optimizer_state` steps.
    """
    exchanged = [slot for slot in slots if slot.exchanged is not None]
    if any(s.exchanged and s.parameter.grad is s.exchanged.owner for s in exchanged):
        return True
    found = (slot.gradient for slot in exchanged)
    return any(_is_nonzero(gradient) for gradient in found if gradient is not None)


def _zeroed(slots: Sequence[Slot]) -> set[Slot]:
    """Slots whose exchanged gradients, which were not 0, are zeros now.

    Only gradients that were written to more often than others are looked at, as clipping writes
    once to each; or all, if each was written to. Waits for the device if there are any.
    """
    writes = {slot: slot.writes() for slot in slots}
    least = min(writes.values(), default=0)
    if least and not any(_is_nonzero(slot.gradient) for slot in slots):
        return set(slots)
    odd = [slot for slot, count in writes.items() if count > least]
    if not odd:
        return set()
    elements = [_elements(slot.gradient) for slot in odd]
    flags = torch.stack([torch.any(each).to(elements[0].device) for each in elements])
    return {slot for slot, has_any in zip(odd, flags.tolist(), strict=True) if not has_any}


def _changed(slot: Slot) -> GradientChangedError:
    """The error for a gradient that was changed or replaced after it was ready."""
    return GradientChangedError(
        "its gradient was modified or replaced between backward() and synchronize()",
        tensor=slot.spec.name,
        cure="Clip, unscale or edit gradients after optimizer.synchronize(), then step "
        "inside optimizer.skip_synchronize()",
    )


def _described(spec: TensorSpec) -> str:
    return f"{list(spec.shape)} {spec.dtype} on {spec.device}"


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
