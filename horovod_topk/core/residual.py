"""Error-feedback memory: what each tensor still owes the model.

A bucket has two flat arenas. `residual` is e, the truth; `candidate` receives e + g and then what
is left after sending. Committing a step swaps the two names; rolling it back forgets the
candidate. e itself is never written, so a roll-back is exact to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from horovod_topk.core.plan import BucketPlan, Plan, TensorSpec
from horovod_topk.errors import StateDictError
from horovod_topk.ops import Ops

Array = TypeVar("Array")

STATE_VERSION = 1


@dataclass
class Arenas(Generic[Array]):
    """The two arenas of one bucket, each of `plan.numel` elements of `plan.residual_dtype`."""

    plan: BucketPlan
    residual: Array
    candidate: Array

    def swap(self) -> None:
        """Make the candidate the residual."""
        self.residual, self.candidate = self.candidate, self.residual


class ResidualRegistry(Generic[Array]):
    """Name -> residual, for all tensors of a plan. New residuals are zero."""

    def __init__(self, plan: Plan, ops: Ops[Array]) -> None:
        self._ops = ops
        self._plan = plan
        self._arenas = {bucket.ordinal: self._allocate(bucket) for bucket in plan.buckets}

    def arenas(self, ordinal: int) -> Arenas[Array]:
        """The arenas of a bucket."""
        return self._arenas[ordinal]

    def residual(self, name: str) -> Array:
        """A view of one tensor's residual, flat.

        Raises:
            KeyError: no such tensor.
        """
        return dict(self._residuals())[name]

    def reset(self) -> None:
        """Set every residual to zero."""
        self._arenas = {bucket.ordinal: self._allocate(bucket) for bucket in self._plan.buckets}

    def replan(self, plan: Plan) -> None:
        """Take on a plan whose tensors are a subset of the present one's, keeping residuals."""
        before = dict(self._residuals())
        self._plan = plan
        kept = {a.plan.ordinal: a for a in self._arenas.values() if a.plan in plan.buckets}
        self._arenas = {b.ordinal: kept.get(b.ordinal) or self._allocate(b) for b in plan.buckets}
        for name, residual in self._residuals():
            self._ops.assign(residual, before[name])

    def state_dict(self) -> dict[str, Any]:
        """Copies of all residuals, flat, with what is needed to refuse a wrong one."""
        copies = {name: self._ops.clone(e) for name, e in self._residuals()}
        return pack_state(self._plan.config.ratio, self._specs(), copies)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy residuals in; nothing changes unless every one of them fits.

        Raises:
            StateDictError: another version, or a tensor missing, unknown or of another shape.
        """
        self.check(state)
        for name, residual in self._residuals():
            self._ops.assign(residual, state["residuals"][name])

    def _allocate(self, bucket: BucketPlan) -> Arenas[Array]:
        size = (bucket.numel, bucket.residual_dtype, bucket.device)
        return Arenas(bucket, self._ops.zeros(*size), self._ops.zeros(*size))

    def _residuals(self) -> Iterator[tuple[str, Array]]:
        for bucket in self._plan.buckets:
            arena = self._arenas[bucket.ordinal].residual
            for tensor in bucket.tensors:
                yield tensor.spec.name, self._ops.view(arena, tensor.start, tensor.stop)

    def check(self, state: Mapping[str, Any]) -> None:
        """Refuse a state dict that does not fit; raises StateDictError."""
        check_state(state, self._specs(), self._ops)

    def _specs(self) -> list[TensorSpec]:
        return [tensor.spec for tensor in self._plan.tensors()]


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


def check_state(state: Mapping[str, Any], specs: Iterable[TensorSpec], ops: Ops[Any]) -> None:
    """Refuse a state dict that is not one of these tensors.

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
        if name not in known:
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
    if not math.isfinite(ops.norm(state["residuals"][name])):
        raise StateDictError(
            "the state dict's residual has a NaN or an infinity",
            tensor=name,
            cure="Load an earlier state, or call reset()",
        )
    received = ops.numel(state["residuals"][name])
    if received != spec.numel:
        raise StateDictError(
            f"the state dict's residual has {received} elements, the gradient {spec.numel}",
            tensor=name,
            cure="Load the state into the model it was saved from, or call reset()",
        )
