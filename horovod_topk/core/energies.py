"""`Energies` computes Adam's factors c from energies; see `horovod_topk.core.arrivals`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from horovod_topk.core.arrivals import (
    ARRIVALS,
    CLASSES,
    ENERGY,
    FACTORS,
    LEAST,
    LOST,
    MOST,
    OFTEN,
    followed,
)
from horovod_topk.core.momentum import Momenta
from horovod_topk.core.plan import BucketPlan
from horovod_topk.core.residual import Arenas
from horovod_topk.core.samples import Sample, constants
from horovod_topk.core.shards import first_block, shard_numel
from horovod_topk.ops import Ops
from horovod_topk.ops.protocol import Place

Array = TypeVar("Array")


class Energies(Generic[Array]):
    """Follows the energies of one bucket for Adam's steps, step after step.

    In each step `begin` comes first, `told` once gradients are encoded, and `finish` last.

    Args:
        bucket: the bucket.
        residuals: arenas of this rank's residuals: those of the bucket, or of each owner's shards.
        owned: arenas of the owner's residuals, if there are owners.
        part: this rank's number among the owners.
        states: arenas of the states, by name; those of arrivals are read only.
        ops: operations on the arrays.
        momenta: give Adam's second beta and mean square of each tensor.
    """

    def __init__(
        self,
        bucket: BucketPlan,
        residuals: Sequence[Arenas[Array]],
        owned: Sequence[Arenas[Array]],
        part: int,
        states: Mapping[str, Arenas[Array]],
        ops: Ops[Array],
        momenta: Momenta,
    ) -> None:
        self._ops, self._bucket, self._states = ops, bucket, states
        self._own, self._owned = residuals[part if owned else 0], owned
        pieces, parts = self._own.plan.tensors, len(residuals)
        self._positions, self._momenta = followed(bucket.gradients), momenta
        sizes = [bucket.gradients[at].spec.numel for at in self._positions]
        self._wholes = [Sample(numel) for numel in sizes]
        # What this rank loses is sampled in its own shards, if there are owners.
        firsts = [pieces[at].first for at in self._positions]
        places = zip(sizes, firsts, strict=True)
        self._shards = [Sample(numel, parts, first) for numel, first in places]
        self._places = tuple(self._place(*each) for each in enumerate(self._positions))
        wholes = self._states[ARRIVALS].plan.tensors
        self._whole_places = tuple(
            (0, wholes[at].start, wholes[at].numel, *each.pick)
            for at, each in zip(self._positions, self._wholes, strict=True)
        )
        plans = [arenas.plan for arenas in (*residuals, *owned)]
        # Gradients of which not all elements are sent.
        self._selecting = sorted(
            {each.gradient for plan in plans for each in plan.tensors if not each.sends_all}
        )
        weights = [1.0] * len(sizes)
        if parts > 1:  # ranks without a shard tell 0
            names = [bucket.gradients[at].spec.name for at in self._positions]
            weights = [_weight(*each, parts) for each in zip(names, sizes, strict=True)]
        self._whole_scales = self._constant([1.0 / each.share for each in self._wholes])
        pairs = zip(weights, self._shards, strict=True)
        self._shard_scales = self._constant(
            [w / each.share if each.size else 0.0 for w, each in pairs]
        )
        gains = [1.0 - most**-2 for most in MOST] * len(sizes)
        self._gains: Any = constants(gains, bucket, ops)  # largest share of E that counts as gained
        self._betas: tuple[float, ...] = ()  # Adam's second betas in the last step
        self._fading: Any = None  # the same for each class of each tensor
        self._gradients: Sequence[Array] = ()  # this rank's, from `begin` to `told`

    def begin(self, gradients: Sequence[Array]) -> None:
        """Note this rank's gradients, which the exchanged ones replace after `told`."""
        self._read_betas()
        self._gradients = gradients

    def squares(self) -> list[Array | None]:
        """Adam's mean square of each gradient before this step; None where none can be used.

        It is of use where some elements are sent and others are not.
        """
        found: list[Array | None] = [None] * len(self._gradients)
        if not self._selecting:
            return found
        like = self._ops.device(self._gradients[0]), self._bucket.residual_dtype
        for at in self._selecting:
            spec = self._bucket.gradients[at].spec
            v = self._momenta.of(spec.name).squares
            if v is not None and self._facts(v) == (spec.numel, *like):
                found[at] = v
        return found

    def _facts(self, array: Array) -> tuple[int, str, str]:
        return self._ops.numel(array), self._ops.device(array), self._ops.dtype(array)

    def told(self) -> Array:
        """The numbers that this rank sends: D' of each class of each tensor, flat.

        They lack what this rank loses as an owner in this step, which is not known yet.
        """
        arenas, gradients = self._states[LOST], self._gradients
        if gradients:
            if not self._lost_by_kernel(gradients):
                came = self._sampled(gradients, self._shards)
                lost = self._lost(came, *self._kept(self._own))
                self._add(arenas, self._fading * arenas.residual, lost)
            self._gradients = ()
        return arenas.candidate

    def finish(self, exchanged: Sequence[Array], gain: float, ranks: int, lost: Array) -> None:
        """Compute the states of the next step, once gradients are exchanged.

        Args:
            exchanged: the gradients of all ranks, times `gain`.
            gain: factor of the exchanged gradients.
            ranks: number of ranks, whose gradients are added up or averaged.
            lost: the mean over ranks of what they have told.
        """
        ops, energy, told = self._ops, self._states[ENERGY], self._states[LOST]
        unit = 1.0 / ranks if self._bucket.reduction == "sum" else 1.0
        factors, phi = self._states[FACTORS].candidate, self._states[ARRIVALS].residual
        each = [exchanged[at] for at in self._positions]
        pair, numbers = (energy.residual, energy.candidate), (unit / gain, ranks, LEAST)
        states = self._whole_scales, self._fading, *pair, lost, self._gains, factors
        if not ops.energies(each, phi, self._whole_places, states, numbers):
            mean: Any = self._sampled(exchanged, self._wholes)
            if unit != gain:
                mean = mean * (unit / gain)
            now = self._by_class(mean * mean, self._wholes, self._whole_scales)
            self._add(energy, self._fading * energy.residual, now)
            ops.assign(factors, self._factors(energy.candidate, lost, ranks))
        for owned in self._owned:
            before, after = self._kept(owned)
            came = self._sampled(exchanged, self._shards) * (1.0 / gain) + after - before
            lost = self._lost(came * unit, before * unit, after * unit)
            self._add(told, told.candidate, lost)

    def _place(self, position: int, at: int) -> Place:
        """Where the sample of what a rank loses is, of the followed tensor at a position."""
        own, whole = self._own.plan.tensors[at], self._states[ARRIVALS].plan.tensors[at]
        return own.start, whole.start, whole.numel, *self._shards[position].pick

    def _read_betas(self) -> None:
        """Read Adam's second betas, which a scheduler or a checkpoint may have changed."""
        names = (self._bucket.gradients[at].spec.name for at in self._positions)
        betas = tuple(self._momenta.of(name).beta2 or 0.0 for name in names)
        if betas != self._betas:
            self._betas = betas
            self._fading = self._ops.transposed(self._constant(betas), CLASSES)

    def _add(self, arenas: Arenas[Array], before: Any, now: Any) -> None:
        """Write before + now to a candidate; 0 where that is not finite."""
        self._ops.assign(arenas.candidate, self._ops.finite(before + now))

    def swap(self) -> None:
        """Make the states of the next step the present ones."""
        for name in (ENERGY, FACTORS, LOST):
            self._states[name].swap()

    def latest(self, *, committed: bool) -> dict[str, Array]:
        """Return the factors c of the last step by tensor name, one for each class.

        committed: whether that step is committed.
        """
        views = self._views(self._states[FACTORS], candidate=not committed)
        names = [self._bucket.gradients[at].spec.name for at in self._positions]
        return dict(zip(names, views, strict=True))

    def _factors(self, energy: Any, lost: Any, ranks: int) -> Array:
        """The factors c, given E' and the mean of D'; 1 where there is no energy."""
        ops, most = self._ops, energy * self._gains
        gained = (abs(lost) - lost) * (0.5 / ranks)  # 0 where energy is taken away
        gained = gained - (gained - most + abs(gained - most)) * 0.5  # at most that
        lost = (lost + abs(lost)) * 0.5 - gained
        share: Any = ops.finite(ops.divided(lost, energy + lost))
        kept: Any = share * (LEAST**2 - 1.0) + 1.0
        return ops.root(ops.cast(kept, "float64"))

    def _lost(self, came: Any, before: Any, after: Any) -> Any:
        """The energy that error feedback takes away, for each class of each tensor: flat.

        This is the energy of what was to be sent, less that of the selected elements, plus that of
        their rounding errors.

        Args:
            came: samples of what was to be sent.
            before, after: samples of the residual before this step, and after it.
        """
        whole = came + before
        is_selected = abs(whole - after) * 2.0 > abs(whole)  # its rounded value was sent
        selected: Any = self._ops.cast(is_selected, self._bucket.residual_dtype)
        energy = came * came - (whole * whole - after * after) * selected
        return self._by_class(energy, self._shards, self._shard_scales)

    def _lost_by_kernel(self, gradients: Sequence[Array]) -> bool:
        """Add what is lost of this rank's gradients to D in a kernel, if there is one."""
        phi, told = self._states[ARRIVALS].residual, self._states[LOST]
        own = [gradients[at] for at in self._positions]
        before, after, every = self._own.unscaled()
        factors = [every[at] for at in self._positions] if every else []
        states = self._shard_scales, self._fading, told.residual, told.candidate
        return self._ops.lost(own, (before, after), factors, phi, self._places, states)

    def _by_class(self, values: Any, samples: Sequence[Sample], scales: Array) -> Any:
        """Add up samples over the elements of each class of each tensor, and scale the sums."""
        ops, sizes, often = self._ops, [each.size for each in samples], self._arrived_often(samples)
        classes = values * often, values - values * often
        sums: Any = ops.joined([ops.segment_sums(each, sizes) for each in classes])
        return ops.transposed(sums * scales, CLASSES)

    def _arrived_often(self, samples: Sequence[Sample]) -> Any:
        """Return 1 for sampled elements that arrived often before this step, 0 for others."""
        views = self._views(self._states[ARRIVALS])
        picks = [each.pick for each in samples]
        before: Any = self._ops.blocks(views, picks, self._bucket.residual_dtype)
        return self._ops.cast(before > OFTEN, self._bucket.residual_dtype)

    def _kept(self, arenas: Arenas[Array]) -> tuple[Any, Any]:
        """Sample a residual before this step, and after it."""
        ops, dtype = self._ops, self._bucket.residual_dtype
        pairs: Any = self._before(arenas)
        before = [kept if scale == 1.0 else kept * scale for kept, scale in pairs]
        picks = [each.pick_within for each in self._shards]
        after = self._views(arenas, candidate=True)
        return ops.blocks(before, picks, dtype), ops.blocks(after, picks, dtype)

    def _before(self, arenas: Arenas[Array]) -> list[tuple[Array, float]]:
        """Each tensor's residual before this step, and the factor that it is to be scaled by."""
        pieces = [arenas.plan.tensors[at] for at in self._positions]
        return [arenas.stretch(piece.start, piece.stop, self._ops) for piece in pieces]

    def _sampled(self, tensors: Sequence[Array], samples: Sequence[Sample]) -> Any:
        """Samples of all followed tensors of a bucket, flat, in the residual's dtype."""
        each = [tensors[at] for at in self._positions]
        return self._ops.blocks(each, [s.pick for s in samples], self._bucket.residual_dtype)

    def _views(self, arenas: Arenas[Array], *, candidate: bool = False) -> list[Array]:
        """Return each followed tensor's view of the residual, or of the candidate, in `arenas`."""
        views = arenas.views(self._ops, candidate=candidate)
        return [views[at] for at in self._positions]

    def _constant(self, numbers: Sequence[float]) -> Array:
        """Make an array of numbers, one for each tensor, and repeat it for each class."""
        return constants([*numbers] * CLASSES, self._bucket, self._ops)


def _weight(name: str, numel: int, owners: int) -> float:
    """Return the number of owners, divided by how many of them own elements of the tensor."""
    firsts = (first_block(name, owners, part) for part in range(owners))
    return owners / sum(shard_numel(numel, owners, first) > 0 for first in firsts)
