"""Follows the exchanges of a bucket for the optimizer's update: `horovod_topk.updates.formulas`.

`Rule` says what is kept and sent. `Tracker` makes the followers of buckets: `SgdFollower` for SGD,
and `AdamFollower` for all others. How often elements arrive is one of their states, which the
update writes; so is the mean square of an optimizer with a step of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Generic, TypeVar

from horovod_topk.core.plan.buckets import BucketPlan
from horovod_topk.core.plan.shards import first_block
from horovod_topk.core.run.follower import FollowerArenas
from horovod_topk.core.state.residual import Arenas
from horovod_topk.methods.protocol import Method, Piece, StateSpec
from horovod_topk.ops import Ops
from horovod_topk.ops.coding import LIMIT, shard_numel
from horovod_topk.ops.protocol import Place
from horovod_topk.updates import formulas
from horovod_topk.updates.formulas import BETA2, LEAST, MOST, NORM_RATE, SPIKE

Array = TypeVar("Array")

ARRIVALS, ENERGY, WITHHELD, DAMPING = "arrivals", "energy", "lost", "factors"  # states: q, E, D, c
SQUARES = "squares"  # v of optimizers with a step of their own
NORMS = "norms"  # SGD's n; its factors are min(1, 3/2 n / |G|)
CLASSES = 2  # of elements: those that arrive often, and the others
SAMPLE = 1 << 15  # elements of a tensor that sums are computed from, at most
TINY = 2.0**-100  # factor of a tensor whose norm overflows; 0 is that of one without a step


@dataclass(frozen=True)
class Moments:
    """What is known of Adam's second moment of a tensor before a step."""

    beta2: float
    square: Any  # v, of the gradient's shape; None: there is none yet


@dataclass(frozen=True)
class Rule:
    """`horovod_topk.methods.protocol.UpdateRule` for the update of an optimizer."""

    name: str  # "sgd", "adam" (and AdamW), or "own": the optimizer's own step

    is_needed_dense: ClassVar[bool] = False  # `UpdateRule.is_needed_dense`

    @property
    def is_linear(self) -> bool:
        """`UpdateRule.is_linear`."""
        return self.name == "sgd"

    @property
    def normalises(self) -> bool:
        """Whether energies are followed: the update may divide by the root of a mean square."""
        return not self.is_linear

    @property
    def is_own(self) -> bool:
        """Whether the optimizer makes its own step, which is corrected afterwards."""
        return self.name == "own"

    def states(self, piece: Piece) -> Mapping[str, StateSpec]:
        """`UpdateRule.states`."""
        classes = CLASSES if self.normalises else 1
        each, known = min(1, piece.numel) * classes, (0.0, math.inf)
        common: Any = {"shared": True, "optional": True}
        coded: Any = {"dtype": "uint8", "in_place": True, "range": (0.0, 1.0)}
        arrivals = StateSpec(piece.numel, **common, **coded)
        damping = StateSpec(each, **common, is_damping=True, range=(0.0, 2.0))
        if not self.normalises:
            norms = StateSpec(each, **common, in_units=True, range=known)
            return {ARRIVALS: arrivals, NORMS: norms, DAMPING: damping}
        energy, withheld = StateSpec(each, **common, range=known), StateSpec(each, optional=True)
        found = {ARRIVALS: arrivals, ENERGY: energy, DAMPING: damping, WITHHELD: withheld}
        if self.is_own:
            found[SQUARES] = StateSpec(piece.numel, **common, in_place=True, range=known)
        return found

    def numbers(self, piece: Piece) -> tuple[str, ...]:
        """`UpdateRule.numbers`: D' of each class."""
        is_sent = self.normalises and piece.numel
        return tuple(f"{WITHHELD}{i}" for i in range(CLASSES)) if is_sent else ()

    def adopted(self, name: str, array: Any, ops: Ops[Any]) -> Any:
        """`UpdateRule.adopted`: earlier versions have saved phi itself."""
        if name != ARRIVALS or ops.dtype(array) == "uint8":
            return array
        code = formulas.code_of(ops.cast(array, "float64"), ops.root)
        return ops.cast(code + 0.5, "uint8")


SGD, ADAM, OWN = Rule("sgd"), Rule("adam"), Rule("own")


class Tracker(Generic[Array]):
    """Follows all buckets of one optimizer, for its updates.

    Args:
        rule: of the optimizer.
        ops: operations on the arrays.
        moments: return Adam's second moments before a step, by tensor name.
    """

    def __init__(
        self, rule: Rule, ops: Ops[Array], moments: Callable[[], Mapping[str, Moments]] = dict
    ) -> None:
        self.rule, self._ops, self._read = rule, ops, moments
        self._moments: Mapping[str, Moments] | None = None  # before this step, once read

    def begin_step(self) -> None:
        """`core.run.follower.Followers.begin_step`."""
        self._moments = None

    def moments(self) -> Mapping[str, Moments]:
        """Adam's second moments before this step, by tensor name."""
        if self._moments is None:
            self._moments = self._read()
        return self._moments

    def follower(
        self, bucket: BucketPlan, memory: FollowerArenas
    ) -> AdamFollower[Array] | SgdFollower[Array]:
        """`core.run.follower.Followers.follower`."""
        if self.rule.normalises:
            return AdamFollower(bucket, memory, self._ops, self.moments)
        return SgdFollower(bucket, memory, self._ops)


class _Bucket(Generic[Array]):
    """What both followers have of a bucket."""

    def __init__(
        self, bucket: BucketPlan, memory: FollowerArenas, ops: Ops[Array], classes: int = 1
    ) -> None:
        self._ops, self._bucket, self._states = ops, bucket, memory.states
        pieces = bucket.gradients
        self._positions = [at for at, piece in enumerate(pieces) if piece.spec.numel]
        self._sizes = [pieces[at].spec.numel for at in self._positions]
        self._wholes = [whole_sample(numel) for numel in self._sizes]
        self.names = [pieces[at].spec.name for at in self._positions]
        self.selecting = selecting(bucket.config, pieces)  # tensors that are not sent whole
        arrivals = memory.states[ARRIVALS].plan.tensors
        self._places = tuple(
            (0, arrivals[at].start, arrivals[at].numel, *each.pick)
            for at, each in zip(self._positions, self._wholes, strict=True)
        )
        each_class = [1.0 / each.share for each in self._wholes] * classes
        self._scales: Any = self._constant(each_class)  # sums of samples -> sums of tensors

    @property
    def codes(self) -> list[Array]:
        """Codes of phi of each tensor's elements, flat: the update reads and writes them."""
        views = self._states[ARRIVALS].views(self._ops)
        return [views[at] for at in self._positions]

    def damping(self, *, committed: bool) -> Array:
        """The factors of the last step: c of each class of each tensor, or SGD's, flat."""
        arenas: Arenas[Array] = self._states[DAMPING]
        return arenas.residual if committed else arenas.candidate

    def _constant(self, numbers: Sequence[float]) -> Array:
        """Make an array of numbers, one for each tensor."""
        return self._ops.numbers(numbers, self._bucket.residual_dtype, self._bucket.device)


class SgdFollower(_Bucket[Array]):
    """Follows the norms of exchanged gradients for SGD, and limits those that are suddenly large.

    Args:
        bucket: the bucket.
        memory: its arenas.
        ops: operations on the arrays.
    """

    def begin(self, gradients: Sequence[Array]) -> None:
        """`Follower.begin`."""

    def squares(self) -> Sequence[Array | None]:
        """`Follower.squares`."""
        return ()

    def message(self) -> Array:
        """`Follower.message`: there is none."""
        raise NotImplementedError

    def finish(self, exchanged: Sequence[Array], gain: float, ranks: int, message: Any) -> None:
        """`Follower.finish`: scale sudden gradients down, and follow the means of their norms."""
        tensors = [exchanged[at] for at in self._positions]
        means, damping = self._states[NORMS], self._states[DAMPING].candidate
        pair, numbers = (means.residual, means.candidate), (NORM_RATE, SPIKE)
        kernel = self._ops.tracker_kernels(tensors, [self._scales, damping, *pair]).spikes
        if kernel is not None:
            kernel(tensors, self._places, self._scales, gain, pair, damping, numbers)
        else:
            self._find(tensors, gain)
            self._ops.limit(tensors, damping)

    def _find(self, tensors: Sequence[Array], gain: float) -> None:
        """Compute the mean norms after this step, and this step's factors, without a kernel."""
        ops, dtype, means = self._ops, self._bucket.residual_dtype, self._states[NORMS]
        sums: Any = ops.energies_of(tensors, None, self._places, dtype)
        scaled: Any = sums * self._scales
        roots: Any = ops.root(ops.cast(ops.finite(scaled), "float64"))
        norms: Any = ops.cast(ops.cast(roots, "float32"), dtype)
        if gain != 1.0:
            norms = norms * (1.0 / gain)
        before: Any = means.residual
        is_known: Any = ops.cast(before > 0.0, dtype)
        counts: Any = ops.cast(norms > 0.0, dtype)  # n waits while gradients are 0
        followed = formulas.norm_after(before, norms) * is_known + norms * (1.0 - is_known)
        ops.assign(means.candidate, ops.finite(before + (followed - before) * counts))
        largest = formulas.largest_norm(before)
        allowed: Any = ops.cast(ops.finite(ops.divided(largest, norms)), dtype)
        # min(1, allowed) is exact: it is 1 where the difference is not negative.
        is_spike: Any = ops.cast(allowed < 1.0, dtype) * is_known * counts
        exceeds: Any = ops.cast(scaled > LIMIT, dtype) * is_known  # |G| overflows
        damping = ((allowed - 1.0) * is_spike + 1.0) * (exceeds * -1.0 + 1.0) + exceeds * TINY
        ops.assign(self._states[DAMPING].candidate, damping)


class AdamFollower(_Bucket[Array]):
    """Follows energies for Adam: what error feedback takes away, and what is exchanged.

    Args:
        bucket: the bucket.
        memory: its arenas.
        ops: operations on the arrays.
        moments: return Adam's second moments before a step, by tensor name.
    """

    def __init__(
        self,
        bucket: BucketPlan,
        memory: FollowerArenas,
        ops: Ops[Array],
        moments: Callable[[], Mapping[str, Moments]],
    ) -> None:
        super().__init__(bucket, memory, ops, CLASSES)
        residuals, owned, self._moments = memory.residuals, memory.owned, moments
        self._own, self._owned = residuals[memory.part if owned else 0], owned
        pieces, parts = self._own.plan.tensors, len(residuals)
        # What this rank loses is sampled in its own shards, if there are owners.
        firsts = [pieces[at].first for at in self._positions]
        pairs = zip(self._sizes, firsts, strict=True)
        self._shards = [TensorSample(numel, parts, first) for numel, first in pairs]
        self._shard_places = self._places_in(self._own)
        self._owned_places = [*map(self._places_in, owned)]
        # Gradients of which this rank, as a rank or an owner, does not send all elements.
        plans = [arenas.plan for arenas in (*residuals, *owned)]
        pieces_of = (each for plan in plans for each in plan.tensors)
        self._selecting = {each.gradient for each in pieces_of if not each.sends_all}
        weights = [1.0] * len(self._sizes)
        if parts > 1:  # ranks without a shard tell 0
            both = zip(self.names, self._sizes, strict=True)
            weights = [_weight(*each, parts) for each in both]
        scales = [
            weight / each.share if each.size else 0.0
            for weight, each in zip(weights, self._shards, strict=True)
        ]
        self._shard_scales: Any = self._constant(scales * CLASSES)
        gains = [1.0 - most**-2 for most in MOST] * len(self._sizes)
        self._gains: Any = self._constant(gains)  # largest share of E that counts as gained
        self._betas: tuple[float, ...] = ()  # Adam's second betas in the last step
        self._fading: Any = None  # the same for each class of each tensor
        self._gradients: Sequence[Array] = ()  # this rank's, from `begin` to `message`
        self._squares: list[Array | None] = []

    def begin(self, gradients: Sequence[Array]) -> None:
        """`Follower.begin`: note the gradients, and read Adam's second moments."""
        self._gradients, known = gradients, self._known()
        betas = tuple(each.beta2 for each in known)
        if betas != self._betas:  # a scheduler or a checkpoint may have changed them
            self._betas = betas
            each_class = [beta for beta in betas for _ in range(CLASSES)]
            self._fading = self._constant(each_class)
        self._squares = [None] * len(gradients)
        device = self._ops.device(gradients[0])
        for at, each in zip(self._positions, known, strict=True):
            v = each.square
            if at in self._selecting and v is not None:
                numel = self._bucket.gradients[at].spec.numel
                if (self._ops.numel(v), self._ops.device(v)) == (numel, device):
                    self._squares[at] = v

    def _known(self) -> list[Moments]:
        """Mean squares of each tensor before this step: Adam's, or those that are kept."""
        if kept := self.squares_kept:
            return [Moments(BETA2, v) for v in kept]
        moments = self._moments()
        return [moments.get(name, Moments(0.0, None)) for name in self.names]

    @property
    def squares_kept(self) -> list[Array]:
        """The mean squares that are kept, flat: the update reads and writes them."""
        if SQUARES not in self._states:
            return []
        views = self._states[SQUARES].views(self._ops)
        return [views[at] for at in self._positions]

    def squares(self) -> Sequence[Array | None]:
        """`Follower.squares`: Adam's, where some elements are sent and others are not."""
        return self._squares

    def message(self) -> Array:
        """`Follower.message`: D' of each class of each tensor.

        It lacks what this rank loses as an owner in this step, which is not known yet.
        """
        arenas: Arenas[Array] = self._states[WITHHELD]
        gradients = self._gradients
        if gradients:
            if not self._withheld_by_kernel(gradients):
                came = self._sampled(gradients)
                self._fade(arenas, arenas.residual, self._withheld(came, *self._kept(self._own)))
            self._gradients = ()
        return arenas.candidate

    def finish(self, exchanged: Sequence[Array], gain: float, ranks: int, message: Any) -> None:
        """`Follower.finish`: compute E', and c from the step's own numbers."""
        ops, energy, arenas = self._ops, self._states[ENERGY], self._states[WITHHELD]
        unit = 1.0 / ranks if self._bucket.reduction == "sum" else 1.0
        damping, codes = self._states[DAMPING].candidate, self._states[ARRIVALS].residual
        each = [exchanged[at] for at in self._positions]
        pair, numbers = (energy.residual, energy.candidate), (unit / gain, ranks, LEAST)
        states = self._scales, self._fading, *pair, self._gains, damping
        kernel = ops.tracker_kernels(each, states).energies
        if kernel is not None:
            kernel(each, codes, self._places, states, message, numbers)
        else:
            dtype = self._bucket.residual_dtype
            sums: Any = ops.energies_of(each, codes, self._places, dtype)
            now: Any = ops.transposed(sums * self._scales, CLASSES)
            self._fade(energy, energy.residual, now * (unit / gain) ** 2)
            ops.assign(damping, self._damping(energy.candidate, self._mean(message), ranks))
        for owned, places in zip(self._owned, self._owned_places, strict=True):
            if self._owner_by_kernel(owned, each, places, (1.0 / gain, unit)):
                continue
            before, after = self._kept(owned)
            came = self._sampled(exchanged) * (1.0 / gain) + after - before
            withheld = self._withheld(came * unit, before * unit, after * unit)
            ops.assign(arenas.candidate, ops.finite(arenas.candidate + withheld))

    def _fade(self, arenas: Arenas[Array], before: Any, now: Any) -> None:
        """Write an energy to a candidate; 0 where it is not finite."""
        after: Any = formulas.energy_after(before, now, self._fading)
        self._ops.assign(arenas.candidate, self._ops.finite(after))

    def _mean(self, message: Array) -> Array:
        """Average over ranks, in rank order, what they have sent."""
        ops, count, dtype = self._ops, CLASSES * len(self.names), self._bucket.residual_dtype
        total: Any = ops.zeros(count, dtype, self._bucket.device)
        ops.accumulate(total, None, ops.unpack_values(message, count, "float32", dtype))
        return total * (1 / ops.rows(message, 4 * count))  # type: ignore[no-any-return]

    def _damping(self, energy: Any, withheld: Any, ranks: int) -> Array:
        """The factors c, given E' and the mean of D'; 1 where there is no energy."""
        ops, most = self._ops, energy * self._gains
        gained = (abs(withheld) - withheld) * (0.5 / ranks)  # 0 where energy is taken away
        gained = gained - (gained - most + abs(gained - most)) * 0.5  # at most that
        withheld = (withheld + abs(withheld)) * 0.5 - gained
        share: Any = ops.finite(ops.divided(withheld, energy + withheld))
        return ops.root(ops.cast(formulas.factor_of(share), "float64"))

    def _withheld(self, came: Any, before: Any, after: Any) -> Any:
        """The energy that error feedback takes away, for each class of each tensor: flat.

        This is the energy of what was to be sent, less that of the selected elements, plus that of
        their rounding errors.

        Args:
            came: samples of what was to be sent.
            before, after: samples of the residual before this step, and after it.
        """
        ops, dtype, whole = self._ops, self._bucket.residual_dtype, came + before
        is_selected = abs(whole - after) * 2.0 > abs(whole)  # its rounded value was sent
        energy = came * came - (whole * whole - after * after) * ops.cast(is_selected, dtype)
        codes: Any = ops.blocks(self.codes, [each.pick for each in self._shards], "float32")
        often: Any = ops.cast(formulas.arrives_often(codes), dtype)
        classes, sizes = [energy * often, energy - energy * often], [s.size for s in self._shards]
        sums: Any = ops.joined([ops.segment_sums(each, sizes) for each in classes])
        return ops.transposed(sums * self._shard_scales, CLASSES)

    def _withheld_by_kernel(self, gradients: Sequence[Array]) -> bool:
        """Add what is lost of this rank's gradients to D in a kernel, if there is one."""
        codes, arenas = self._states[ARRIVALS].residual, self._states[WITHHELD]
        own = [gradients[at] for at in self._positions]
        before, after, every = self._own.unscaled()
        scales = [every[at] for at in self._positions] if every else []
        states = self._shard_scales, self._fading, arenas.residual, arenas.candidate
        kernel = self._ops.tracker_kernels(own, [before, after, *states], scales).energy_withheld
        if kernel is not None:
            kernel(own, (before, after), codes, self._shard_places, states)
        return kernel is not None

    def _owner_by_kernel(
        self,
        owned: Arenas[Array],
        exchanged: Sequence[Array],
        places: tuple[Place, ...],
        numbers: tuple[float, float],
    ) -> bool:
        """Add what this rank loses as an owner to D' in a kernel, if there is one."""
        codes, arenas = self._states[ARRIVALS].residual, self._states[WITHHELD]
        before, after, every = owned.unscaled()
        scales = [every[at] for at in self._positions] if every else []
        states = self._shard_scales, arenas.candidate
        kernels = self._ops.tracker_kernels(exchanged, [before, after, *states], scales)
        kernel = kernels.energy_of_owner
        if kernel is not None:
            kernel(exchanged, (before, after), codes, places, states, numbers)
        return kernel is not None

    def _places_in(self, arenas: Arenas[Array]) -> tuple[Place, ...]:
        """Where the samples of this rank's shards are, in gradients and in arenas of the shards."""
        pieces = arenas.plan.tensors
        return tuple(
            (pieces[at].start, *place[1:3], *shard.pick)
            for at, place, shard in zip(self._positions, self._places, self._shards, strict=True)
        )

    def _kept(self, arenas: Arenas[Array]) -> tuple[Any, Any]:
        """Sample a residual before this step, and after it."""
        ops, dtype = self._ops, self._bucket.residual_dtype
        pieces = [arenas.plan.tensors[at] for at in self._positions]
        pairs: Any = [arenas.stretch(piece.start, piece.stop, ops) for piece in pieces]
        before = [kept if scale == 1.0 else kept * scale for kept, scale in pairs]
        picks = [each.pick_within for each in self._shards]
        every = arenas.views(ops, candidate=True)
        after = [every[at] for at in self._positions]
        return ops.blocks(before, picks, dtype), ops.blocks(after, picks, dtype)

    def _sampled(self, tensors: Sequence[Array]) -> Any:
        """Samples of this rank's shards of all tensors, flat, in the residual's dtype."""
        each, picks = [tensors[at] for at in self._positions], [s.pick for s in self._shards]
        return self._ops.blocks(each, picks, self._bucket.residual_dtype)


@dataclass(frozen=True)
class TensorSample:
    """Where a sample of a tensor is: in every `parts`-th block of one of its shards.

    Args:
        numel: number of elements of the tensor.
        shards: number of shards that it is split into; 1: it is whole.
        first: first block of the shard.
    """

    numel: int
    shards: int = 1
    first: int = 0

    @cached_property
    def parts(self) -> int:
        """One of so many blocks is sampled. It is odd, or all of them could be of one column."""
        return max(1, -(-shard_numel(self.numel, self.shards, self.first) // SAMPLE)) | 1

    @cached_property
    def share(self) -> float:
        """The sample's share of the tensor's elements."""
        return self.size / self.numel

    @cached_property
    def whole(self) -> Place:
        """Where the sample of a whole tensor is that has arrays of its own."""
        return 0, 0, self.numel, *self.pick

    @cached_property
    def pick(self) -> tuple[int, int, int]:
        """The sample of a whole tensor, for `Ops.blocks`."""
        return self.shards, self.first, self.parts

    @cached_property
    def pick_within(self) -> tuple[int, int, int]:
        """The sample of an array that has the shard's elements alone."""
        return 1, 0, self.parts

    @cached_property
    def size(self) -> int:
        """Number of elements of the sample."""
        return shard_numel(shard_numel(self.numel, self.shards, self.first), self.parts, 0)


@lru_cache(maxsize=4096)
def whole_sample(numel: int) -> TensorSample:
    """Return the sample of a whole tensor. It is cached, as every step asks for it."""
    return TensorSample(numel)


def selecting(config: Method, pieces: Sequence[Piece]) -> set[str]:
    """Names of the gradients of which ranks or owners send some elements only.

    They are equal on all ranks, also where some of them own no shard.
    """
    directions = "direct", "gather"
    return {
        piece.spec.name
        for piece in pieces
        if not all(config.piece(piece, direction).sends_all for direction in directions)
    }


def _weight(name: str, numel: int, owners: int) -> float:
    """Return the number of owners, divided by how many of them own elements of the tensor."""
    firsts = (first_block(name, owners, part) for part in range(owners))
    return owners / sum(shard_numel(numel, owners, first) > 0 for first in firsts)
