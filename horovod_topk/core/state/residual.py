"""Residuals in flat arrays that are written in place.

A bucket has two flat arenas. `residual` is e as the last commit left it; `candidate` receives e + g
and then what is left after sending. Committing a step swaps the two; rolling it back ignores the
candidate. A step never writes e, so a roll-back is exact to the bit.

Where learning rates change at every step, e is rescaled at every step, and a separate pass over
memory would cost half as much as a step's additions. So the factor is stored until e is read, and a
kernel that can multiply takes e and the factor.

Arenas may store their elements in fewer bits. Then a step decodes e before it encodes a bucket
(`widen`), and encodes the new residual right after (`narrow`); only the second of these rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar, cast

from horovod_topk.core.plan.buckets import BucketPlan, Plan
from horovod_topk.core.state.named_state import NamedState, StoredArray, as_row
from horovod_topk.ops import Ops
from horovod_topk.ops.coding import BLOCK, SCALE_BYTES, VALUE_BITS, scales, value_bytes

__all__ = ["STORED", "Arenas", "NarrowArenas", "ResidualRegistry", "Stretch", "as_row", "scaled"]

Array = TypeVar("Array")
# Setting `residuals` -> the kind of `ops.coding`; None: the dtype of residuals.
STORED = {"float32": None, "bfloat16": "bfloat16", "int8": "stable8", "int4": "int4"}


@dataclass
class _Arena(Generic[Array]):
    """An array, and factors by which stretches of it are still to be multiplied."""

    array: Array
    factors: dict[tuple[int, int], float] = field(default_factory=dict)
    views: list[Array] = field(default_factory=list)  # of each tensor's elements, once needed

    def rescaled(self, ops: Ops[Array] | None) -> Array:
        """Multiply the array by its factors in place, and return it."""
        if self.factors:
            assert ops is not None  # `Arenas.rescale` has set it
            views = [ops.view(self.array, *stretch) for stretch in self.factors]
            ops.scale(views, [*self.factors.values()])
            self.factors.clear()
        return self.array

    def stretch(self, start: int, stop: int, ops: Ops[Array]) -> tuple[Array, float]:
        """A view of a stretch, and its factor; of what is stored in fewer bits a copy, and 1."""
        return ops.view(self.array, start, stop), self.factors.get((start, stop), 1.0)

    def scale(self, stretch: tuple[int, int], factor: float, ops: Ops[Array]) -> None:
        """Multiply a stretch, when it is next read."""
        if stretch in self.factors:
            self.rescaled(ops)
        self.factors[stretch] = factor

    def read(self, start: int, stop: int, ops: Ops[Array]) -> Array:
        """A stretch: a view, or a copy if it is stored in fewer bits."""
        return ops.view(self.rescaled(ops), start, stop)

    def write(self, start: int, stop: int, source: Array, ops: Ops[Array]) -> None:
        """Replace a stretch."""
        ops.assign(self.read(start, stop, ops), source)

    def copy(self, start: int, stop: int, other: Self, ops: Ops[Array]) -> None:
        """Replace a stretch by that of another arena, to the bit."""
        self.write(start, stop, other.read(start, stop, ops), ops)

    def split(self, plan: BucketPlan, ops: Ops[Array]) -> Sequence[Array]:
        """Each tensor's stretch."""
        array = self.rescaled(ops)
        if not self.views:
            self.views += [ops.view(array, t.start, t.stop) for t in plan.tensors]
        return self.views


class _Narrow(_Arena[Array]):
    """An arena in fewer bits: `array` has its bytes, which factors never change.

    Tensors begin at multiples of a block, so that no block has elements of two tensors.

    Attributes:
        wide: its elements, while a step encodes; else None.
    """

    def __init__(self, plan: BucketPlan, kind: str, ops: Ops[Array]) -> None:
        super().__init__(ops.zeros(value_bytes(kind, plan.numel), "uint8", plan.device))
        self._numel, self._kind, self._ops = plan.numel, kind, ops
        self._dtype, self._device = plan.residual_dtype, plan.device
        self.wide: Array | None = None

    def open(self) -> None:
        """Set `wide` to zeros, for a step to write."""
        self.wide = self._ops.zeros(self._numel, self._dtype, self._device)

    def rescaled(self, ops: Ops[Array] | None) -> Array:
        """All elements, times their factors."""
        if self.wide is not None:
            return self.wide
        whole, ops = self._decoded(self.array, self._numel), self._ops
        ops.scale([ops.view(whole, *each) for each in self.factors], [*self.factors.values()])
        return whole

    def store(self) -> None:
        """Encode `wide`, which a step has written."""
        if self.wide is not None:
            self.array, self.wide = self._ops.pack_values(self.wide, self._kind), None
            self.factors.clear()

    def stretch(self, start: int, stop: int, ops: Ops[Array]) -> tuple[Array, float]:
        return self.read(start, stop, ops), 1.0

    def scale(self, stretch: tuple[int, int], factor: float, ops: Ops[Array]) -> None:
        self.wide = None
        self.factors[stretch] = self.factors.get(stretch, 1.0) * factor

    def read(self, start: int, stop: int, ops: Ops[Array]) -> Array:
        if self.wide is not None or start == stop:
            return ops.view(self.rescaled(ops), start, stop)
        parts = [ops.view(self.array, *span) for span in self._spans(start, stop)]
        values = self._decoded(ops.joined(parts), stop - start)
        ops.write_scaled(values, self.factors.get((start, stop), 1.0), values, False)
        return values

    def write(self, start: int, stop: int, source: Array, ops: Ops[Array]) -> None:
        if start == stop:
            return
        self.wide, at = None, 0
        here = ops.zeros(stop - start, self._dtype, self._device)
        ops.assign(here, source)
        data = ops.pack_values(here, self._kind)
        for begin, end in self._spans(start, stop):
            ops.assign(ops.view(self.array, begin, end), ops.view(data, at, at + end - begin))
            at += end - begin
        self.factors.pop((start, stop), None)

    def copy(self, start: int, stop: int, other: Self, ops: Ops[Array]) -> None:
        self.wide = None
        for span in self._spans(start, stop):
            ops.assign(ops.view(self.array, *span), ops.view(other.array, *span))
        self.factors.pop((start, stop), None)
        if (start, stop) in other.factors:
            self.factors[start, stop] = other.factors[start, stop]

    def split(self, plan: BucketPlan, ops: Ops[Array]) -> Sequence[Array]:
        whole = self.rescaled(ops)
        return [ops.view(whole, t.start, t.stop) for t in plan.tensors]

    def _decoded(self, data: Array, count: int) -> Array:
        rows = self._ops.unpack_values(as_row(self._ops, data), count, self._kind, self._dtype)
        return self._ops.row(rows, 0)

    def _spans(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The bytes of a tensor's elements: those of its scales, and those of its values."""
        block, width = BLOCK.get(self._kind, 1), VALUE_BITS[self._kind]
        at = SCALE_BYTES * scales(self._kind, self._numel)
        ends = [SCALE_BYTES * (start // block), SCALE_BYTES * -(-stop // block)] if at else [0, 0]
        return [(ends[0], ends[1]), (at + start * width // 8, at + -(-stop * width // 8))]


class Arenas(Generic[Array]):
    """The two arenas of one bucket, each of `plan.numel` elements of `plan.residual_dtype`."""

    def __init__(self, plan: BucketPlan, residual: Array, candidate: Array) -> None:
        self.plan, self._verbs = plan, cast("Ops[Array] | None", None)
        self._residual, self._candidate = _Arena(residual), _Arena(candidate)
        self.aside: dict[tuple[int, int], Array] = {}  # residuals that `set_aside` has taken out

    @property
    def residual(self) -> Array:
        """The residual, as the last commit left it."""
        return self._residual.rescaled(self._verbs)

    @property
    def candidate(self) -> Array:
        """The residual if the step commits; after a commit, the residual before it."""
        return self._candidate.rescaled(self._verbs)

    def rescale(self, start: int, stop: int, factor: float, ops: Ops[Array]) -> None:
        """Multiply a stretch of the residual, when it is next read."""
        self._verbs = ops
        self._residual.scale((start, stop), factor, ops)

    def unscaled(self) -> tuple[Array, Array, list[float]]:
        """Residual, candidate and the factors of the residual's tensors that are not applied yet.

        The candidate is to be overwritten in this step, or has been. Factors: one for each tensor;
        empty if all are 1.
        """
        self._candidate.factors.clear()
        waiting = self._residual.factors
        factors = [waiting.get((t.start, t.stop), 1.0) for t in self.plan.tensors if waiting]
        return self._residual.array, self._candidate.array, factors

    def stretch(self, start: int, stop: int, ops: Ops[Array]) -> tuple[Array, float]:
        """A view of one tensor's residual, and the factor that it is still to be multiplied by."""
        return self._residual.stretch(start, stop, ops)

    def read(self, start: int, stop: int, ops: Ops[Array]) -> Array:
        """One tensor's residual: a view, or a copy if it is stored in fewer bits."""
        return self._residual.read(start, stop, ops)

    def write(self, start: int, stop: int, source: Array, ops: Ops[Array]) -> None:
        """Replace one tensor's residual."""
        self._residual.write(start, stop, source, ops)

    def views(self, ops: Ops[Array], *, candidate: bool = False) -> Sequence[Array]:
        """Return each tensor's view of the residual, or of the candidate."""
        return (self._candidate if candidate else self._residual).split(self.plan, ops)

    def set_aside(self, names: Collection[str], ops: Ops[Array]) -> None:
        """Replace the residuals of some tensors, by name, by zeros until `put_back`."""
        for start, stop in self._stretches(names):
            self.aside[start, stop] = ops.clone(self.read(start, stop, ops))
            nothing = ops.zeros(stop - start, self.plan.residual_dtype, self.plan.device)
            self.write(start, stop, nothing, ops)

    def put_back(self, names: Collection[str], ops: Ops[Array]) -> None:
        """Restore the residuals that `set_aside` has replaced by zeros.

        names: tensors whose candidate gets it as well, since their step counts.
        """
        both = set(self._stretches(names)) if self.aside else set()
        for (start, stop), residual in self.aside.items():
            if (start, stop) in both:
                candidate: Any = self._candidate.read(start, stop, ops)
                self._candidate.write(start, stop, candidate + residual, ops)
            self.write(start, stop, residual, ops)
        self.aside.clear()

    def keep(self, names: Collection[str], ops: Ops[Array]) -> None:
        """Make the residuals of some tensors, by name, their candidates, before `swap`."""
        for start, stop in self._stretches(names):
            self._candidate.copy(start, stop, self._residual, ops)

    def _stretches(self, names: Collection[str]) -> list[tuple[int, int]]:
        """Start and stop in the arena of each of these tensors that has elements."""
        return [(t.start, t.stop) for t in self.plan.tensors if t.numel and t.spec.name in names]

    def swap(self) -> None:
        """Make the candidate the residual."""
        self._residual, self._candidate = self._candidate, self._residual


class NarrowArenas(Arenas[Array]):
    """Arenas that store their elements in fewer bits, in a `coding` of values."""

    _residual: _Narrow[Array]
    _candidate: _Narrow[Array]

    def __init__(self, plan: BucketPlan, kind: str, ops: Ops[Array]) -> None:
        residual, candidate = _Narrow(plan, kind, ops), _Narrow(plan, kind, ops)
        super().__init__(plan, residual.array, candidate.array)
        self._residual, self._candidate = residual, candidate

    def unscaled(self) -> tuple[Array, Array, list[float]]:
        """`Arenas.unscaled`: what is read in fewer bits is scaled."""
        self._candidate.factors.clear()
        return self._residual.rescaled(None), self._candidate.rescaled(None), []

    def widen(self) -> None:
        """Decode the residual, before it is read and the candidate is written."""
        self._residual.wide = None  # of a step that has ended by an error
        self._residual.wide = self._residual.rescaled(None)
        self._candidate.open()

    def narrow(self) -> None:
        """Encode the candidate, once it is written."""
        self._candidate.store()
        self._residual.wide = None


@dataclass(frozen=True)
class Squares:
    """Sums of squares of one rank's gradients in a step: numbers, or scalars in a graph."""

    gradient: Any = 0.0  # gradients, or their velocities where momentum is corrected
    compensated: Any = 0.0  # gradients plus residual; 0: not known
    left: Any = 0.0  # the part that was not sent

    def __add__(self, other: Squares) -> Squares:
        return Squares(
            self.gradient + other.gradient,
            self.compensated + other.compensated,
            self.left + other.left,
        )

    def __radd__(self, other: int) -> Squares:
        """Begin a `sum`. To add zeros would take operations of a graph."""
        return self


@dataclass(frozen=True)
class Stretch(Generic[Array]):
    """`StoredArray` that is a stretch of an arena."""

    arenas: Arenas[Array]
    span: tuple[int, int]  # start and stop
    ops: Ops[Array]
    numel: int
    parts: int
    first: int

    def read(self) -> Array:
        """`StoredArray.read`: a view."""
        aside = self.arenas.aside.get(self.span)
        return self.arenas.read(*self.span, self.ops) if aside is None else aside

    def write(self, source: Array) -> None:
        """`StoredArray.write`."""
        if self.span in self.arenas.aside:
            self.ops.assign(self.arenas.aside[self.span], source)
        else:
            self.arenas.write(*self.span, source, self.ops)


class ResidualRegistry(NamedState[Array]):
    """`NamedState` in arenas, for all tensors of a plan. New residuals are zero.

    Args:
        holders: returns the plans whose arenas together hold a bucket's residuals: the bucket
            itself, one plan for each shard, or none where a rank keeps no residuals.
        stored: `NamedState.stored`; the plan's tensors have to begin at multiples of its block.
        in_place: whether residual and candidate are one array, which others write.
    """

    def __init__(
        self,
        plan: Plan,
        ops: Ops[Array],
        holders: Callable[[BucketPlan], Sequence[BucketPlan]] = lambda bucket: (bucket,),
        stored: str | None = None,
        *,
        in_place: bool = False,
    ) -> None:
        super().__init__(ops)
        self.stored = stored
        self._holders, self.in_place = holders, in_place
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
        """The arenas of every bucket."""
        for group in self._arenas.values():
            yield from group

    def scale(self, factor: float) -> None:
        """Multiply every residual."""
        self.rescale(dict.fromkeys(self.specs, factor))

    def rescale(self, factors: Mapping[str, float]) -> None:
        """Multiply the residuals of some tensors, by name, when they are next read."""
        for arenas in self.all_arenas():
            for tensor in arenas.plan.tensors:
                if tensor.spec.name in factors:
                    factor = factors[tensor.spec.name]
                    arenas.rescale(tensor.start, tensor.stop, factor, self._ops)

    def switch_plan(self, plan: Plan) -> None:
        """Switch to a plan of the same tensors in the same places; residuals stay in memory."""
        for bucket in plan.buckets:
            pairs = zip(self._arenas[bucket.ordinal], self._holders(bucket), strict=True)
            for arenas, holder in pairs:
                assert arenas.plan.places == holder.places  # only ratios differ
                arenas.plan = holder
        self._find(plan)

    def replan(self, plan: Plan) -> None:
        """Switch to a plan of a subset of the present tensors, keeping their residuals.

        The caller makes sure that all other residuals are zero.
        """
        kept = [tensor.spec.name for tensor in plan.tensors()]
        self.released |= set(self.pieces) - set(kept)
        before = {name: self._ops.clone(self.residual(name)) for name in kept}
        self._take_on(plan)
        for name in kept:
            self.assign(name, before[name])

    def _take_on(self, plan: Plan) -> None:
        known = {arenas.plan.digest: arenas for arenas in self.all_arenas()}
        self._arenas = {}
        for bucket in plan.buckets:
            holders = self._holders(bucket)
            made = iter(self._allocate([each for each in holders if each.digest not in known]))
            self._arenas[bucket.ordinal] = [
                known.get(each.digest) or next(made) for each in holders
            ]
        self._find(plan)

    def _find(self, plan: Plan) -> None:
        """Note where each tensor is stored."""
        self.specs = {tensor.spec.name: tensor.spec for tensor in plan.tensors()}
        pieces: dict[str, list[StoredArray[Array]]] = {name: [] for name in self.specs}
        for arenas in self.all_arenas():
            for tensor in arenas.plan.tensors:
                self.specs[tensor.spec.name] = tensor.spec
                where = tensor.numel, arenas.plan.parts, tensor.first
                stretch = Stretch(arenas, (tensor.start, tensor.stop), self._ops, *where)
                pieces[tensor.spec.name].append(stretch)
        self.pieces = {**pieces}

    def _allocate(self, plans: Sequence[BucketPlan]) -> list[Arenas[Array]]:
        """Return new arenas for the plans that together hold a bucket."""
        if not plans:
            return []
        stored = self.stored
        sizes = [0 if stored else plan.numel for plan in plans]
        size = sizes, plans[0].residual_dtype, plans[0].device
        residuals = self._ops.arrays(*size)
        candidates = residuals if self.in_place else self._ops.arrays(*size)
        return [
            NarrowArenas(plan, stored, self._ops) if stored and plan.numel else Arenas(plan, *pair)
            for plan, *pair in zip(plans, residuals, candidates, strict=True)
        ]

    def _arrays(self) -> Iterator[Array]:
        for arenas in self.all_arenas():
            yield arenas.residual
            yield from arenas.aside.values()


def scaled(values: Array, factor: float, ops: Ops[Array], like: Array | None = None) -> Array:
    """A scaled copy, in the dtype of `like`."""
    out = ops.clone(values if like is None else like)
    ops.write_scaled(ops.clone(values), factor, out, False)
    return out
