"""Checks values that were read from JSON or TOML against types."""

from __future__ import annotations

import functools
import reprlib
import types
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from horovod_topk.cost.quantities import is_number, is_whole


def fits(kind: Any, value: object) -> bool:
    """Whether a value has a type. Numbers are ones that can be computed with; lists are tuples.

    kind: a type, or `Annotated` with a function that tells further whether a value is right.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return fits(inner[0], value) and bool(inner[1](value))
    if origin in (Union, types.UnionType):
        return any(fits(each, value) for each in inner)
    if origin is tuple:
        each = inner[:1] * len(value) if isinstance(value, list) and ... in inner else inner
        return isinstance(value, list) and len(value) == len(each) and all(map(fits, each, value))
    if origin in (dict, Mapping):
        return isinstance(value, dict) and all(fits(inner[1], each) for each in value.values())
    if kind in (float, int):
        return is_number(value) if kind is float else is_whole(value)
    return kind in (object, Any) or type(value) is kind


def misfit(kind: type, value: object, of: str = "") -> str:
    """The first field of an object that is missing, unknown or of a wrong type; empty: none is.

    kind: a dataclass, whose fields may be dataclasses, or tuples of one.
    """
    if not isinstance(value, dict):
        return f"{of or 'it'} is no object"
    kinds = _kinds(kind)
    for name in (*kinds, *value):
        if name not in kinds or name not in value:
            return f"{of}{name} is {'missing' if name in kinds else 'no field'}"
    problems = (_problem(kinds[name], value[name], f"{of}{name}") for name in kinds)
    return next(filter(None, problems), "")


def _problem(kind: Any, value: object, name: str) -> str:
    element = next(iter(get_args(kind)), None)
    if is_dataclass(kind):
        return misfit(kind, value, f"{name}.")  # type: ignore[arg-type]
    if is_dataclass(element) and isinstance(value, list):
        return next(filter(None, (_problem(element, each, name) for each in value)), "")
    return "" if fits(kind, value) else f"{name} is {reprlib.repr(value)}"


_kinds = functools.cache(functools.partial(get_type_hints, include_extras=True))
