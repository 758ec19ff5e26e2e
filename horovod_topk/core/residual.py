"""Error-feedback memory: what each tensor still owes the model.

A bucket has two flat arenas. `residual` is e, the truth; `candidate` receives e + g and then what
is left after sending. Committing a step swaps the two names; rolling it back forgets the
candidate. e itself is never written, so a roll-back is exact to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from horovod_topk.core.plan import RESIDUAL_DTYPE, BucketPlan, Plan, TensorPlan, TensorSpec
from horovod_topk.errors import StateDictError
from horovod_topk.ops import Ops

Array = TypeVar("Array")

STATE_VERSION = 1
COMMITTED = "committed"  # of a state dict: steps, where the ratio depends on them
ASKED = "asked"  # of a state dict: the ratio that `set_ratio` asked for, if it did
RELEASED = "released"  # of a state dict: tensors that left the plan, and so have no residual
STEPS = "steps"  # of a shard: how many had ended when it was saved
METHOD_STATE = "state."  # before the name of a method's state, as a part of a state dict
SHARED = "shared"  # of such a part: whether it is equal on all ranks
OWNER = ("ranks", "rank", "nodes")  # what says whose the residuals of shards are


@dataclass
class Arenas(Generic[Array]):
    """The two arenas of one bucket, each of `plan.numel` elements of `plan.residual_dtype`."""

    plan: BucketPlan
    residual: Array
    candidate: Array

    def swap(self) -> None:
        """Make the candidate the residual."""
        self.residual, self.candidate = self.candidate, self.residual


def parts_of(state: Mapping[str, Any]) -> list[str]:
    """Names of the state dicts within a state dict."""
    return [key for key in state if key in ("owned", "velocity") or key.startswith(METHOD_STATE)]


Piece = tuple[Arenas[Array], TensorPlan]  # a tensor, or a shard of one, and where it lies


class ResidualRegistry(Generic[Array]):
    """Name -> residual, for all tensors of a plan. New residuals are zero.

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
        self._ops, self._holders = ops, holders
        self._arenas: dict[int, list[Arenas[Array]]] = {}
        self._pieces: dict[str, list[Piece[Array]]] = {}
        self._released: set[str] = set()  # tensors that have left the plan, and owed nothing
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

    def residual(self, name: str) -> Array:
        """One tensor's residual, flat: a view, or a copy if it is in several pieces or in none.

        Raises:
            KeyError: no such tensor.
        """
        pieces = self._pieces[name]
        if len(pieces) == 1:
            return self._view(*pieces[0])
        bucket, tensor = self._whole[name]
        whole = self._ops.zeros(tensor.spec.numel, bucket.residual_dtype, bucket.device)
        for arenas, tensor in pieces:
            values = self._view(arenas, tensor)
            if tensor.numel:
                place = self._places(arenas, tensor)
                self._ops.accumulate(whole, as_row(self._ops, place), as_row(self._ops, values))
        return whole

    def reset(self) -> None:
        """Set every residual to zero."""
        for arenas in self.all_arenas():
            size = (arenas.plan.numel, arenas.plan.residual_dtype, arenas.plan.device)
            self._ops.assign(arenas.residual, self._ops.zeros(*size))

    def scale(self, factor: float) -> None:
        """Multiply every residual."""
        for arenas in self.all_arenas():
            self._ops.deliver(arenas.residual, factor, arenas.residual, False)

    def rescale(self, factors: Mapping[str, float]) -> None:
        """Multiply the residuals of some tensors, by name, in place."""
        for name, factor in factors.items():
            for piece in self._pieces.get(name, ()):
                view = self._view(*piece)
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
        self._released |= set(self._whole) - set(kept)
        before = {name: self._ops.clone(self.residual(name)) for name in kept}
        self._take_on(plan)
        for name in kept:
            self._assign(name, before[name])

    def state_dict(self) -> dict[str, Any]:
        """Copies of what is kept, flat, with what is needed to refuse a wrong one."""
        copies = {spec.name: self._ops.clone(self.residual(spec.name)) for spec in self._specs()}
        state = pack_state(self._plan.config.ratio, self._specs(), copies)
        return state | {RELEASED: sorted(self._released)} if self._released else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy residuals in; nothing changes unless every one of them fits.

        Raises:
            StateDictError: as `check`.
        """
        self.check(state)
        for spec in self._specs():
            if spec.name in state["residuals"]:
                self._assign(spec.name, state["residuals"][spec.name])
            else:
                self._clear(spec.name)

    def check(self, state: Mapping[str, Any]) -> None:
        """Refuse a state dict that does not fit.

        A tensor that had left the plan when it was saved has no residual in it, and owes nothing;
        for one that has left the plan here, it may have a residual of zeros.

        Raises:
            StateDictError: another version, or a tensor missing, unknown or of another shape, or
                one that has left the plan here and is owed something there.
        """
        gone = released_of(state) - set(state.get("residuals", ()))
        specs = [spec for spec in self._specs() if spec.name not in gone]
        check_state(state, specs, self._ops, self._released)
        check_nothing_is_owed(state["residuals"], self._released, self._ops)

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
        self._plan = plan
        self._whole = {t.spec.name: (b, t) for b in plan.buckets for t in b.tensors}
        self._pieces = {name: [] for name in self._whole}
        for arenas in self.all_arenas():
            for tensor in arenas.plan.tensors:
                self._pieces[tensor.spec.name].append((arenas, tensor))

    def _allocate(self, plan: BucketPlan) -> Arenas[Array]:
        size = (plan.numel, plan.residual_dtype, plan.device)
        return Arenas(plan, self._ops.zeros(*size), self._ops.zeros(*size))

    def _clear(self, name: str) -> None:
        for arenas, tensor in self._pieces[name]:
            size = (tensor.numel, arenas.plan.residual_dtype, arenas.plan.device)
            self._ops.assign(self._view(arenas, tensor), self._ops.zeros(*size))

    def _assign(self, name: str, source: Array) -> None:
        pieces = self._pieces[name]
        for arenas, tensor in pieces:
            part = source
            if len(pieces) > 1:
                size = (tensor.spec.numel, arenas.plan.residual_dtype, arenas.plan.device)
                here = self._ops.zeros(*size)  # the source may be on another device
                self._ops.assign(here, source)
                part = self._ops.take(here, self._places(arenas, tensor))
            self._ops.assign(self._view(arenas, tensor), part)

    def _view(self, arenas: Arenas[Array], tensor: TensorPlan) -> Array:
        return self._ops.view(arenas.residual, tensor.start, tensor.stop)

    def _places(self, arenas: Arenas[Array], tensor: TensorPlan) -> Array:
        """Where the elements of a piece lie in its tensor."""
        own = self._ops.arange(tensor.numel, arenas.plan.device)
        return self._ops.spot(own, arenas.plan.parts, tensor.first)

    def _specs(self) -> list[TensorSpec]:
        return [pieces[0][1].spec for pieces in self._pieces.values() if pieces]


def as_row(ops: Ops[Array], array: Array) -> Array:
    """[1, n] of [n], n >= 1."""
    return ops.load(array, ops.numel(array), 0, ops.numel(array))


def scaled(values: Array, factor: float, ops: Ops[Array], like: Array | None = None) -> Array:
    """A scaled copy; of the dtype of `like`."""
    out = ops.clone(values if like is None else like)
    ops.deliver(ops.clone(values), factor, out, False)
    return out


def pack_state(
    ratio: float, specs: Iterable[TensorSpec], residuals: Mapping[str, Any]
) -> dict[str, Any]:
    """A state dict of residuals by name."""
    return {
        "version": STATE_VERSION,
        "ratio": ratio,
        "shapes": {spec.name: list(spec.shape) for spec in specs},
        "residuals": dict(residuals),
    }


def check_state(
    state: Mapping[str, Any],
    specs: Iterable[TensorSpec],
    ops: Ops[Any],
    besides: Collection[str] = (),
) -> None:
    """Refuse a state dict that is not one of these tensors.

    Args:
        state: any.
        specs: the tensors.
        ops: of the arrays.
        besides: names that it may have, too.

    Raises:
        StateDictError: another version, or a tensor missing, unknown or of another shape.
    """
    absent = {"version", "shapes", "residuals"} - set(state)
    if absent:
        raise StateDictError(
            f"the state dict lacks {', '.join(sorted(absent))}",
            cure="Pass what state_dict() of a TopKEF compressor returned",
        )
    if state["version"] != STATE_VERSION:
        raise StateDictError(
            f"the state dict has version {state['version']!r}, this version reads {STATE_VERSION}",
            cure="Load it with the version of horovod_topk that wrote it",
        )
    known = set[str]()
    for spec in specs:
        _check_tensor(spec, state, ops)
        known.add(spec.name)
    for name in state["residuals"]:
        if name not in known and name not in besides:
            raise StateDictError(
                "the state dict has a residual for it, the optimizer has no such tensor",
                tensor=name,
                cure="Load the state into the model it was saved from, or call reset()",
            )


def _check_tensor(spec: TensorSpec, state: Mapping[str, Any], ops: Ops[Any]) -> None:
    name, expected = spec.name, list(spec.shape)
    if name not in state["residuals"] or name not in state["shapes"]:
        raise StateDictError(
            "the state dict has no residual for it",
            tensor=name,
            cure="Load the state into the model it was saved from, or call reset()",
        )
    if list(state["shapes"][name]) != expected:
        raise StateDictError(
            f"the state dict's shape is {list(state['shapes'][name])}, the gradient's {expected}",
            tensor=name,
            cure="Load the state into the model it was saved from, or call reset()",
        )
    residual = state["residuals"][name]
    received = ops.numel(residual)
    if received != spec.numel or len(residual.shape) != 1:
        raise StateDictError(
            f"the state dict's residual has {received} elements and the shape "
            f"{list(residual.shape)}, the gradient {spec.numel}, of which a flat one is kept",
            tensor=name,
            cure="Load the state into the model it was saved from, or call reset()",
        )
    if not math.isfinite(ops.norm(_as_kept(residual, spec, ops))):
        raise StateDictError(
            f"the state dict's residual has a NaN or an infinity, or becomes one in "
            f"{RESIDUAL_DTYPE[spec.dtype]}",
            tensor=name,
            cure="Load an earlier state, or call reset()",
        )


def _as_kept(residual: Any, spec: TensorSpec, ops: Ops[Any]) -> Any:
    """A copy in the dtype that it would have."""
    copy = ops.zeros(spec.numel, RESIDUAL_DTYPE[spec.dtype], "cpu")
    ops.assign(copy, residual)
    return copy


def check_origin(state: Mapping[str, Any], specs: Iterable[TensorSpec], reduction: str) -> None:
    """Refuse what `checkpoint.save` noted to be of other units or of other shapes.

    Shapes of what a rank owns for its node are those of its parts, of which tensors of different
    shapes may have equal ones.

    Raises:
        StateDictError: it is.
    """
    for spec in specs:
        saved, shape = state.get("tensors", {}).get(spec.name), list(spec.shape)
        if saved is not None and list(saved) != shape:
            raise StateDictError(
                f"the state dict is of the shape {list(saved)}, the gradient's is {shape}",
                tensor=spec.name,
                cure="Load the state into the model it was saved from, or call reset()",
            )
    saved = state.get("reduction", reduction)
    if saved != reduction:
        raise StateDictError(
            f"the state dict is of gradients reduced to their {saved}, these are reduced to their "
            f"{reduction}",
            cure="Pass the same op= as when it was saved",
        )


def check_nothing_is_owed(
    residuals: Mapping[str, Any], released: Iterable[str], ops: Ops[Any]
) -> None:
    """Refuse residuals of tensors that keep none here.

    Args:
        residuals: by name.
        released: the tensors that have left the plan.
        ops: of the arrays.

    Raises:
        StateDictError: one is not zero, and would be lost.
    """
    for name in sorted({*released} & {*residuals}):
        norm = ops.norm(residuals[name])
        if norm != 0.0:
            raise StateDictError(
                f"its gradient is sparse, and not compressed here: the state dict's residual of "
                f"norm {norm:.3g} would be lost",
                tensor=name,
                cure="Pass sparse_as_dense=True to hvd.DistributedOptimizer, as when it was saved",
            )


def released_of(state: Mapping[str, Any]) -> set[str]:
    """The tensors that had left the plan when a state dict was made.

    Raises:
        StateDictError: these are no names.
    """
    released = state.get(RELEASED, [])
    if not (isinstance(released, list) and all(isinstance(name, str) for name in released)):
        raise StateDictError(
            f"the state dict says that {released!r} were released, which is no list of names",
            cure="Pass what state_dict() of a TopKEF compressor returned",
        )
    return set(released)


def check_velocity(kept: bool, state: Mapping[str, Any]) -> None:
    """Refuse a state dict without the velocities that are kept, and one whose would be lost.

    Raises:
        StateDictError: it was saved with another setting of `momentum`.
    """
    if kept != ("velocity" in state):
        lacks, has = ("lacks", "has momentum=") if kept else ("has", "has none")
        raise StateDictError(
            f"the state dict {lacks} velocities of momentum correction, this compressor {has}",
            cure="Pass the momentum= it was saved with, or call reset()",
        )


def committed_of(state: Mapping[str, Any], otherwise: int) -> int:
    """How many steps were committed when a state dict was made, if it says so.

    Raises:
        StateDictError: it is no such number.
    """
    committed = state.get(COMMITTED, otherwise)
    if type(committed) is not int or committed < 0:
        raise StateDictError(
            f"the state dict says that {committed!r} steps were committed, which is no whole "
            "number >= 0",
            cure="Pass what state_dict() of a TopKEF compressor returned",
        )
    return committed


def asked_of(state: Mapping[str, Any]) -> float | None:
    """The ratio that `set_ratio` had asked for when a state dict was made; None: none.

    Raises:
        StateDictError: it is no ratio.
    """
    asked = state.get(ASKED)
    if asked is not None and not (type(asked) is float and 0 < asked <= 1):
        raise StateDictError(
            f"the state dict says that ratio {asked!r} was asked for, which is none in (0, 1]",
            cure="Pass what state_dict() of a TopKEF compressor returned",
        )
    return asked


def steps_of(state: Mapping[str, Any], otherwise: int) -> int:
    """How many steps had ended when `checkpoint.save` wrote a state dict, if it did."""
    steps = state.get(STEPS, otherwise)
    return steps if type(steps) is int else otherwise


def owner_of(owned: Mapping[str, Any] | None) -> Mapping[str, object] | None:
    """Whose the owned shards of a state dict are; None if it has none."""
    return None if owned is None else {key: owned[key] for key in OWNER if key in owned}


def check_owner(here: Mapping[str, object] | None, owned: Mapping[str, Any] | None) -> None:
    """Refuse residuals of shards that are not this rank's: they would be lost.

    Args:
        here: `Exchange.owner` of this rank, if its exchange has owners.
        owned: what a state dict has of owned shards.

    Raises:
        StateDictError: they are another rank's, or of other ranks or nodes.
    """
    saved = owner_of(owned)
    if here != saved:
        raise StateDictError(
            f"the state dict is of {_describe(saved)}, this is {_describe(here)}",
            cure="Load each rank's own state with the exchange and the ranks and nodes it was "
            "saved with, or call reset()",
        )


def _describe(owner: Mapping[str, object] | None) -> str:
    if owner is None:
        return "an exchange without owners"
    on = f" on nodes {owner['nodes']}" if "nodes" in owner else ""
    return f"rank {owner.get('rank')} of {owner.get('ranks')} that own shards{on}"
