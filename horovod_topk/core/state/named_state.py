"""One part of the state by tensor name: residuals, owner's residuals or velocities.

It is read, written, saved and checked in the row-major order of each tensor's elements, wherever
the arrays are stored and however they are split into shards.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from horovod_topk.core.plan.buckets import TensorSpec
from horovod_topk.core.state.state_dict import (
    LARGEST,
    OPTIONAL,
    RELEASED,
    SHARED,
    check_nothing_is_owed,
    check_state,
    pack_state,
    released_of,
)
from horovod_topk.methods.protocol import StateSpec
from horovod_topk.ops import Ops

Array = TypeVar("Array")


class StoredArray(Protocol[Array]):
    """The stored array of one tensor, or of one shard of it."""

    @property
    def numel(self) -> int:
        """Number of elements."""

    @property
    def parts(self) -> int:
        """Number of shards that the tensor is split into; 1: it is whole."""

    @property
    def first(self) -> int:
        """First block of the shard; see `core.plan.shards`."""

    def read(self) -> Array:
        """The array, flat; it may share memory with the stored array."""

    def write(self, source: Array) -> None:
        """Replace the elements, cast to the stored dtype."""


class NamedState(Generic[Array]):
    """One part of the state by tensor name: residuals, owner's residuals or velocities.

    A subclass, or the caller that fills in `specs` and `pieces`, decides where arrays are stored.

    Attributes:
        specs: the specs of tensors; for owner's residuals, those of their shards.
        pieces: the stored array of each tensor: one piece, one for each shard, or none where this
            rank keeps nothing.
        released: tensors that have left the plan; their residuals were zero.
        stored: the kind of `ops.coding` that arrays are stored in; None: the residual's dtype.
    """

    stored: str | None = None

    def __init__(self, ops: Ops[Array]) -> None:
        self._ops = ops
        self.specs: dict[str, TensorSpec] = {}
        self.pieces: dict[str, Sequence[StoredArray[Array]]] = {}
        self.released: set[str] = set()
        self.spec: StateSpec | None = None  # of a method's state, or of a follower's

    @property
    def is_optional(self) -> bool:
        """Whether it starts at zero where a saved one does not fit."""
        return self.spec is not None and self.spec.optional

    @property
    def facts(self) -> dict[str, Any]:
        """What a state dict has to say of this part."""
        if self.spec is None:
            return {}
        return {SHARED: self.spec.shared} | ({OPTIONAL: True} if self.spec.optional else {})

    def residual(self, name: str) -> Array:
        """One tensor's array, flat: a view, or a copy if it has several pieces or none."""
        pieces, spec = self.pieces[name], self.specs[name]
        if len(pieces) == 1:
            return pieces[0].read()
        whole = self._zeros(spec)
        for piece in pieces:
            if piece.numel:
                values = as_row(self._ops, piece.read())
                self._ops.accumulate(whole, as_row(self._ops, self._places(spec, piece)), values)
        return whole

    def assign(self, name: str, source: Array) -> None:
        """Replace one tensor's array by a flat one, which may be on another device."""
        pieces, spec = self.pieces[name], self.specs[name]
        if len(pieces) == 1:
            pieces[0].write(source)
        elif pieces:
            here = self._zeros(spec)
            self._ops.assign(here, source)
            for piece in pieces:
                piece.write(self._ops.take(here, self._places(spec, piece)))

    def clear(self, name: str) -> None:
        """Set one tensor's array to zero."""
        spec = self.specs[name]
        for piece in self.pieces[name]:
            piece.write(self._ops.zeros(piece.numel, spec.residual_dtype, spec.device))

    def reset(self) -> None:
        """Set every array to zero."""
        for name in self.pieces:
            self.clear(name)

    def norm(self) -> float:
        """Euclidean norm of all arrays. Waits for the device."""
        return math.hypot(*map(self._ops.norm, self._arrays()))

    def state_dict(self, ratio: float) -> dict[str, Any]:
        """Copies of the arrays, with what is needed to refuse a state dict that does not fit."""
        held = self._held()
        copies = {spec.name: self._ops.clone(self.residual(spec.name)) for spec in held}
        state = pack_state(ratio, held, copies) | self.facts
        return state | {RELEASED: sorted(self.released)} if self.released else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy arrays in; nothing changes unless every one of them fits."""
        self.check(state)
        self.take_on(state, self.pieces)

    def take_on(self, state: Mapping[str, Any], names: Collection[str]) -> None:
        """Copy in the arrays of some tensors from a state dict that fits; absent ones become 0."""
        for name in names:
            if name in state["residuals"]:
                self.assign(name, state["residuals"][name])
            else:
                self.clear(name)

    def check(self, state: Mapping[str, Any], names: Collection[str] | None = None) -> None:
        """Refuse a state dict that does not fit.

        A tensor that had left the plan when the state was saved has no residual in it, and becomes
        zero; for a tensor that has left the plan here, the state may have a residual of zeros.

        names: the tensors to check; None: all.
        """
        gone = released_of(state) - set(state.get("residuals", ()))
        specs = [
            s for s in self._held() if s.name not in gone and (names is None or s.name in names)
        ]
        largest = LARGEST if self.spec is None else math.inf
        check_state(state, specs, self._ops, self.released, largest)
        check_nothing_is_owed(state["residuals"], self.released, self._ops)

    def _held(self) -> list[TensorSpec]:
        """Tensors of which this rank keeps a piece."""
        return [self.specs[name] for name, pieces in self.pieces.items() if pieces]

    def _arrays(self) -> Iterator[Array]:
        return (piece.read() for pieces in self.pieces.values() for piece in pieces)

    def _zeros(self, spec: TensorSpec) -> Array:
        return self._ops.zeros(spec.numel, spec.residual_dtype, spec.device)

    def _places(self, spec: TensorSpec, piece: StoredArray[Array]) -> Array:
        """The index in the whole tensor of each element of a piece."""
        own = self._ops.arange(piece.numel, spec.device)
        return self._ops.global_index(own, piece.parts, piece.first)


def as_row(ops: Ops[Array], array: Array) -> Array:
    """Reshape a flat array of n >= 1 elements to [1, n]."""
    return ops.load(array, ops.numel(array), 0, ops.numel(array))
