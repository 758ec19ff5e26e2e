"""The plan of an exchange: gradients and their variables as the core describes them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from horovod_topk.core.control.schedule import Schedule
from horovod_topk.core.plan.buckets import Plan, TensorSpec, make_plan
from horovod_topk.errors import ShapeChangedError, UnsupportedOperationError
from horovod_topk.methods.protocol import Allocation, Method, UpdateRule

Specs = tuple[TensorSpec, ...]
Groups = int | tuple[tuple[int, ...], ...] | None


@dataclass(frozen=True)
class TapeSettings:
    """Arguments to Horovod beside the compressor, and what the optimizer's update needs."""

    reduction: str  # "average" or "sum"
    groups: Groups  # None, a number of buckets, or ids of variables
    process_set: Any
    update_rule: UpdateRule | None = None  # what is kept and sent for the optimizer's update
    optimizer: str | None = None  # name of its class; None: it is not known

    @property
    def key(self) -> tuple[object, ...]:
        """A key that is equal where the settings are equal."""
        return self.reduction, self.groups, self.process_set.process_set_id


def groups_by_id(groups: Any) -> Groups:
    """The user's `groups=` as ids, which do not keep variables alive."""
    if isinstance(groups, list):
        return tuple(tuple(id(unwrap(v)) for v in group) for group in groups)
    number: int | None = groups
    return number


def unwrap(variable: Any) -> Any:
    """The tf.Variable behind a variable of Keras 3."""
    inner = variable if isinstance(variable, tf.Variable) else getattr(variable, "value", None)
    if not isinstance(inner, tf.Variable):
        raise UnsupportedOperationError(
            f"a gradient was asked for by {variable!r}, which is no variable and can have no "
            "residual",
            cure="Take gradients by variables, or use a tape with Compression.none",
        )
    return inner


def names_of(variables: Iterable[Any]) -> list[str]:
    """Unique names from the variables' own names; repeated names get a number."""
    names: list[str] = []
    for variable in variables:
        name = getattr(variable, "path", None) or variable.name.removesuffix(":0")
        ordinal, unique = 1, name
        while unique in names:
            ordinal, unique = ordinal + 1, f"{name}#{ordinal + 1}"
        names.append(unique)
    return names


def shapes_of(names: Sequence[str], variables: Sequence[Any]) -> dict[str, list[int] | None]:
    """Shapes of variables by name; None: not fixed."""
    shapes = (unwrap(variable).shape for variable in variables)
    known = (shape.as_list() if shape.is_fully_defined() else None for shape in shapes)
    return dict(zip(names, known, strict=True))


def spec_of(name: str, gradient: Any, variable: Any) -> TensorSpec:
    """The core's description of a gradient."""
    shape = variable.shape
    if not shape.is_fully_defined():
        raise ShapeChangedError(
            f"its shape {shape} is not fixed, so that no residual can be kept for it",
            tensor=name,
            cure="Create the variable with a fully defined shape, or leave it out of the gradients",
        )
    if not gradient.shape.is_compatible_with(shape):
        raise ShapeChangedError(
            f"its gradient is {list(gradient.shape)}, its variable {list(shape)}",
            tensor=name,
            cure="Pass gradients and variables in the same order",
        )
    return TensorSpec(name, tuple(shape), gradient.dtype.name, variable.device or "cpu")


def plan_of(
    specs: Sequence[TensorSpec],
    variables: Sequence[Any],
    config: Method,
    settings: TapeSettings,
    names: Sequence[str],
) -> Plan:
    """Plan the buckets: the user's groups, then default ones in the order of the backward pass.

    names: names of all variables, also of those without a gradient, for patterns to match.
    """
    of_variable = {id(unwrap(v)): spec for v, spec in zip(variables, specs, strict=True)}
    groups = _asked_groups(specs, of_variable, settings.groups)
    own = settings.reduction, groups, names, settings.update_rule
    return make_plan(list(reversed(specs)), config, *own)


def _asked_groups(
    specs: Sequence[TensorSpec], of_variable: dict[int, TensorSpec], groups: Groups
) -> list[list[TensorSpec]]:
    """The user's `groups=` as lists of specs; a number splits the specs into as many lists."""
    if groups is None:
        return []
    if isinstance(groups, tuple):
        asked = [[of_variable[i] for i in group if i in of_variable] for group in groups]
        return [group for group in asked if group]
    size, larger = divmod(len(specs), groups)
    bounds = [i * size + min(i, larger) for i in range(groups + 1)]
    parts = [list(specs[a:b]) for a, b in itertools.pairwise(bounds)]
    return [part for part in parts if part]


@dataclass(frozen=True)
class CachedPlan:
    """The plan for one set of gradients, and the name of its collectives."""

    specs: Specs  # in the order of the variables
    plan: Plan
    prefix: str
    ordinal: int

    @property
    def name(self) -> str:
        """The prefix of the collectives' names, equal on all ranks."""
        return f"{self.prefix}.{self.ordinal}"

    def at(self, ratio: float, allocation: Allocation) -> CachedPlan:
        """The same plan at a ratio level, with an allocation to tensors that it has."""
        names = {tensor.spec.name for tensor in self.plan.tensors()}
        allocation = allocation if names.issuperset(dict(allocation)) else ()
        if ratio == self.plan.config.ratio and not allocation:
            return self
        schedule = Schedule(self.plan.config)  # config: ratios of single tensors are resolved
        settings = schedule.settings(ratio, allocation)
        return replace(self, plan=self.plan.under(settings, self.plan.update_rule))
