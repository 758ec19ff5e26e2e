"""Residuals in flat arrays that are written in place.

A bucket has two flat arenas. `residual` is e as the last commit left it; `candidate` receives e + g
and then what is left after sending. Committing a step swaps the two; rolling it back ignores the
candidate. A step never writes e, so a roll-back is exact to the bit.

Where learning rates change at every step, e is rescaled at every step, and a separate pass over
memory would cost half as much as a step's additions. So the factor is stored until e is read, and a
kernel that can multiply takes e and the factor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

from horovod_topk.core.part import Part, Piece, as_row
from horovod_topk.core.plan import BucketPlan, Plan
from horovod_topk.methods import protocol
from horovod_topk.ops import Ops

__all__ = ["Arenas", "ResidualRegistry", "Stretch", "as_row", "scaled"]

Array = TypeVar("Array")


@dataclass
class _Arena(Generic[Array]):
    """An array, and factors by which stretches of it are still to be multiplied."""

    array: Array
    factors: dict[tuple[int, int], float] = field(default_factory=dict)
    views: list[Array] = field(default_factory=list)  # of each tensor's elements, once needed

    def rescaled(self, ops: Ops[Array] | None) -> Array:
        """Multiply the array by its factors in place, and return it."""
        for stretch, factor in self.factors.items():
            assert ops is not None  # `Arenas.rescale` has set it
            view = ops.view(self.array, *stretch)
            ops.write_scaled(view, factor, view, False)
        self.factors.clear()
        return self.array


class Arenas(Generic[Array]):
    """The two arenas of one bucket, each of `plan.numel` elements of `plan.residual_dtype`.

    Args:
        plan: the bucket.
        residual, candidate: the arrays.
    """

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
        self._verbs, waiting = ops, self._residual.factors
        if (start, stop) in waiting:
            self._residual.rescaled(ops)
        waiting[start, stop] = factor

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
        factor = self._residual.factors.get((start, stop), 1.0)
        return ops.view(self._residual.array, start, stop), factor

    def views(self, ops: Ops[Array], *, candidate: bool = False) -> Sequence[Array]:
        """Return each tensor's view of the residual, or of the candidate."""
        arena = self._candidate if candidate else self._residual
        array = arena.rescaled(self._verbs)
        if not arena.views:
            arena.views += [ops.view(array, t.start, t.stop) for t in self.plan.tensors]
        return arena.views

    def set_aside(self, names: Collection[str], ops: Ops[Array]) -> None:
        """Replace the residuals of some tensors, by name, by zeros until `put_back`."""
        for start, stop in self._stretches(names):
            view = ops.view(self.residual, start, stop)
            self.aside[start, stop] = ops.clone(view)
            nothing = ops.zeros(stop - start, self.plan.residual_dtype, self.plan.device)
            ops.assign(view, nothing)

    def put_back(self, names: Collection[str], ops: Ops[Array]) -> None:
        """Restore the residuals that `set_aside` has replaced by zeros.

        names: tensors whose candidate gets it as well, since their step counts.
        """
        both = set(self._stretches(names)) if self.aside else set()
        for (start, stop), residual in self.aside.items():
            if (start, stop) in both:
                candidate: Any = ops.view(self.candidate, start, stop)
                ops.assign(candidate, candidate + residual)
            ops.assign(ops.view(self.residual, start, stop), residual)
        self.aside.clear()

    def keep(self, names: Collection[str], ops: Ops[Array]) -> None:
        """Make the residuals of some tensors, by name, their candidates, before `swap`."""
        for start, stop in self._stretches(names):
            before = ops.view(self.residual, start, stop)
            ops.assign(ops.view(self.candidate, start, stop), before)

    def _stretches(self, names: Collection[str]) -> list[tuple[int, int]]:
        """Start and stop in the arena of each of these tensors that has elements."""
        return [(t.start, t.stop) for t in self.plan.tensors if t.numel and t.spec.name in names]

    def swap(self) -> None:
        """Make the candidate the residual."""
        self._residual, self._candidate = self._candidate, self._residual


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


@dataclass(frozen=True)
class Stretch(Generic[Array]):
    """`Piece` that is a stretch of an arena."""

    arenas: Arenas[Array]
    tensor: protocol.Piece
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
        start, stop = self.tensor.start, self.tensor.stop
        if (start, stop) in self.arenas.aside:
            return self.arenas.aside[start, stop]
        return self.ops.view(self.arenas.residual, start, stop)

    def write(self, source: Array) -> None:
        """`Piece.write`."""
        self.ops.assign(self.read(), source)


class ResidualRegistry(Part[Array]):
    """`Part` in arenas, for all tensors of a plan. New residuals are zero.

    Args:
        plan: the plan of all tensors.
        ops: operations on the arenas.
        holders: returns the plans whose arenas together hold a bucket's residuals: the bucket
            itself, one plan for each shard, or none where a rank keeps no residuals.
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
        """The arenas of every bucket."""
        for group in self._arenas.values():
            yield from group

    def scale(self, factor: float) -> None:
        """Multiply every residual."""
        for arenas in self.all_arenas():
            self._ops.write_scaled(arenas.residual, factor, arenas.residual, False)

    def rescale(self, factors: Mapping[str, float]) -> None:
        """Multiply the residuals of some tensors, by name, when they are next read."""
        for arenas in self.all_arenas():
            for tensor in arenas.plan.tensors:
                if tensor.spec.name in factors:
                    factor = factors[tensor.spec.name]
                    arenas.rescale(tensor.start, tensor.stop, factor, self._ops)

    def turn_to(self, plan: Plan) -> None:
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
        self._arenas = {
            bucket.ordinal: [
                known.get(holder.digest) or self._allocate(holder)
                for holder in self._holders(bucket)
            ]
            for bucket in plan.buckets
        }
        self._find(plan)

    def _find(self, plan: Plan) -> None:
        """Note where each tensor is stored."""
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
        for arenas in self.all_arenas():
            yield arenas.residual
            yield from arenas.aside.values()


def scaled(values: Array, factor: float, ops: Ops[Array], like: Array | None = None) -> Array:
    """A scaled copy, in the dtype of `like`."""
    out = ops.clone(values if like is None else like)
    ops.write_scaled(ops.clone(values), factor, out, False)
    return out
