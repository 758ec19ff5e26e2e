"""Error-feedback memory: the residual of each tensor, and what else is kept by tensor name.

In memory that is written in place a bucket has two flat arenas. `residual` is e, the truth;
`candidate` receives e + g and then what is left after sending. Committing a step swaps the two
names; rolling it back forgets the candidate. e itself is never written by a step, so a roll-back is
exact to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from horovod_topk.core.plan import RESIDUAL_DTYPE, BucketPlan, Plan, TensorPlan, TensorSpec
from horovod_topk.core.state_dict import (
    RELEASED,
    check_nothing_is_owed,
    check_state,
    pack_state,
    released_of,
)
from horovod_topk.ops import Ops

Array = TypeVar("Array")


@dataclass
class Arenas(Generic[Array]):
    """The two arenas of one bucket, each of `plan.numel` elements of `plan.residual_dtype`."""

    plan: BucketPlan
    residual: Array
    candidate: Array

    def swap(self) -> None:
        """Make the candidate the residual."""
        self.residual, self.candidate = self.candidate, self.residual


class Piece(Protocol[Array]):
    """Where one tensor's array lies, or one shard of it."""

    @property
    def numel(self) -> int:
        """Elements."""
        ...

    @property
    def parts(self) -> int:
        """Number of shards that the tensor is split into; 1: it is whole."""
        ...

    @property
    def first(self) -> int:
        """First block of the shard; see `horovod_topk.core.shards`."""
        ...

    def read(self) -> Array:
        """The array, flat; it may share memory with what it is read from."""
        ...

    def write(self, source: Array) -> None:
        """Replace the elements, cast to the dtype that is kept."""
        ...


class Part(Generic[Array]):
    """One part of the state by tensor name: residuals, owner's residuals or velocities.

    Where it lies is the subclass's affair, or that of who fills in `specs` and `pieces`.

    Attributes:
        specs: the tensors; of owner's residuals the shards that are kept of them.
        pieces: where each tensor's array lies: in one piece, in one for each shard, or in none,
            where this rank keeps nothing.
        released: tensors that have left the plan, with residuals of zero.
        facts: what else a state dict says of this part.
    """

    def __init__(self, ops: Ops[Array]) -> None:
        self._ops = ops
        self.specs: dict[str, TensorSpec] = {}
        self.pieces: dict[str, Sequence[Piece[Array]]] = {}
        self.released: set[str] = set()
        self.facts: dict[str, Any] = {}

    def residual(self, name: str) -> Array:
        """One tensor's array, flat: a view, or a copy if it is in several pieces or in none.

        Raises:
            KeyError: no such tensor.
        """
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
            piece.write(self._ops.zeros(piece.numel, RESIDUAL_DTYPE[spec.dtype], spec.device))

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
        """Copy arrays in; nothing changes unless every one of them fits.

        Raises:
            StateDictError: as `check`.
        """
        self.check(state)
        self.take_on(state, self.pieces)

    def take_on(self, state: Mapping[str, Any], names: Collection[str]) -> None:
        """Copy in the arrays of some tensors, of a state dict that fits; what it lacks is zero."""
        for name in names:
            if name in state["residuals"]:
                self.assign(name, state["residuals"][name])
            else:
                self.clear(name)

    def check(self, state: Mapping[str, Any], names: Collection[str] | None = None) -> None:
        """Refuse a state dict that does not fit.

        A tensor that had left the plan when it was saved has no residual in it, and counts as zero;
        for one that has left the plan here, it may have a residual of zeros.

        names: the tensors to look at; None: all.

        Raises:
            StateDictError: another version, or a tensor missing, unknown or of another shape, or a
                residual that is not zero for a tensor that has left the plan here.
        """
        gone = released_of(state) - set(state.get("residuals", ()))
        specs = [
            s for s in self._held() if s.name not in gone and (names is None or s.name in names)
        ]
        check_state(state, specs, self._ops, self.released)
        check_nothing_is_owed(state["residuals"], self.released, self._ops)

    def _held(self) -> list[TensorSpec]:
        """Tensors of which this rank keeps something."""
        return [self.specs[name] for name, pieces in self.pieces.items() if pieces]

    def _arrays(self) -> Iterator[Array]:
        return (piece.read() for pieces in self.pieces.values() for piece in pieces)

    def _zeros(self, spec: TensorSpec) -> Array:
        return self._ops.zeros(spec.numel, RESIDUAL_DTYPE[spec.dtype], spec.device)

    def _places(self, spec: TensorSpec, piece: Piece[Array]) -> Array:
        """Index in its tensor of each element of a piece."""
        own = self._ops.arange(piece.numel, spec.device)
        return self._ops.spot(own, piece.parts, piece.first)


@dataclass(frozen=True)
class Stretch(Generic[Array]):
    """`Piece`: elements of an arena."""

    arenas: Arenas[Array]
    tensor: TensorPlan
    ops: Ops[Array]

    @property
    def numel(self) -> int:
        """`Piece.numel`."""
        return self.tensor.numel

    @property
    def parts(self) -> int:
        """`Piece.parts`."""
        return self.arenas.plan.parts

    @property
    def first(self) -> int:
        """`Piece.first`."""
        return self.tensor.first

    def read(self) -> Array:
        """`Piece.read`: a view."""
        return self.ops.view(self.arenas.residual, self.tensor.start, self.tensor.stop)

    def write(self, source: Array) -> None:
        """`Piece.write`."""
        self.ops.assign(self.read(), source)


class ResidualRegistry(Part[Array]):
    """`Part` in arenas, for all tensors of a plan. New residuals are zero.

    Args:
        plan: the tensors.
        ops: of the arenas.
        holders: gives the plans whose arenas together hold a bucket's residuals: the bucket itself,
            one for each shard of it, or none, where nothing is kept.
    """

    def __init__(
        self,
        plan: Plan,
        ops: Ops[Array],
        holders: Callable[[BucketPlan], Sequence[BucketPlan]] = lambda bucket: (bucket,),
    ) -> None:
        super().__init__(ops)
        self._holders = holders
        self._arenas: dict[int, list[Arenas[Array]]] = {}
        self._take_on(plan)

    def arenas(self, ordinal: int) -> Arenas[Array]:
        """The arenas of a bucket that is in one piece."""
        (arenas,) = self._arenas[ordinal]
        return arenas

    def shards(self, ordinal: int) -> Sequence[Arenas[Array]]:
        """The arenas of each shard of a bucket."""
        return self._arenas[ordinal]

    def all_arenas(self) -> Iterator[Arenas[Array]]:
        """Those of every bucket."""
        for group in self._arenas.values():
            yield from group

    def scale(self, factor: float) -> None:
        """Multiply every residual."""
        for arenas in self.all_arenas():
            self._ops.deliver(arenas.residual, factor, arenas.residual, False)

    def rescale(self, factors: Mapping[str, float]) -> None:
        """Multiply the residuals of some tensors, by name, in place."""
        for name, factor in factors.items():
            for piece in self.pieces.get(name, ()):
                view = piece.read()
                self._ops.deliver(view, factor, view, False)

    def turn_to(self, plan: Plan) -> None:
        """Take on a plan of the same tensors in the same places; residuals stay where they are."""
        for bucket in plan.buckets:
            pairs = zip(self._arenas[bucket.ordinal], self._holders(bucket), strict=True)
            for arenas, holder in pairs:
                assert arenas.plan.places == holder.places  # of the same settings but for ratios
                arenas.plan = holder
        self._find(plan)

    def replan(self, plan: Plan) -> None:
        """Take on a plan whose tensors are a subset of the present one's, keeping residuals.

        Those of the others are zero: see to it before.
        """
        kept = [tensor.spec.name for tensor in plan.tensors()]
        self.released |= set(self.pieces) - set(kept)
        before = {name: self._ops.clone(self.residual(name)) for name in kept}
        self._take_on(plan)
        for name in kept:
            self.assign(name, before[name])

    def _take_on(self, plan: Plan) -> None:
        known = {arenas.plan.digest: arenas for arenas in self.all_arenas()}
        self._arenas = {
            bucket.ordinal: [
                known.get(holder.digest) or self._allocate(holder)
                for holder in self._holders(bucket)
            ]
            for bucket in plan.buckets
        }
        self._find(plan)

    def _find(self, plan: Plan) -> None:
        """Note where each tensor lies."""
        self.specs = {tensor.spec.name: tensor.spec for tensor in plan.tensors()}
        pieces: dict[str, list[Piece[Array]]] = {name: [] for name in self.specs}
        for arenas in self.all_arenas():
            for tensor in arenas.plan.tensors:
                self.specs[tensor.spec.name] = tensor.spec
                pieces[tensor.spec.name].append(Stretch(arenas, tensor, self._ops))
        self.pieces = {**pieces}

    def _allocate(self, plan: BucketPlan) -> Arenas[Array]:
        size = (plan.numel, plan.residual_dtype, plan.device)
        return Arenas(plan, self._ops.zeros(*size), self._ops.zeros(*size))

    def _arrays(self) -> Iterator[Array]:
        return (arenas.residual for arenas in self.all_arenas())


def as_row(ops: Ops[Array], array: Array) -> Array:
    """[1, n] of [n], n >= 1."""
    return ops.load(array, ops.numel(array), 0, ops.numel(array))


def scaled(values: Array, factor: float, ops: Ops[Array], like: Array | None = None) -> Array:
    """A scaled copy; of the dtype of `like`."""
    out = ops.clone(values if like is None else like)
    ops.deliver(ops.clone(values), factor, out, False)
    return out
