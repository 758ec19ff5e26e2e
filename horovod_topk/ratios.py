"""Check a mapping of tensor patterns to ratios, and resolve it to tensor names.

A rule is a pattern of tensor names, or a function of a tensor's name and shape, and a ratio. The
first rule that matches a tensor is used. A plan resolves rules to one ratio for each tensor name:
ranks compare these ratios, and not patterns or functions.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from fnmatch import fnmatchcase
from functools import partial
from numbers import Integral, Real
from types import FunctionType
from typing import Any

from horovod_topk.errors import ConfigError

DENSE = "dense"  # 1.0 in a rule

Shape = tuple[int, ...]
Test = Callable[[str, Shape], bool]
Asked = Mapping[Any, float | str] | Sequence[tuple[Any, float | str]]


class Exactly(str):
    """A pattern that matches one tensor name exactly, with any characters."""

    __slots__ = ()


class Predicate:
    """A function of a tensor's name and shape that decides whether a rule matches the tensor.

    Two predicates are equal if their functions have the same code, defaults and closure. So a
    lambda that is evaluated anew in each step still makes equal settings.
    """

    def __init__(self, function: Test) -> None:
        self.function = function
        self._key = _key_of(function)

    def __call__(self, name: str, shape: Shape) -> bool:
        """Return whether the rule matches a tensor of this name and shape.

        Raises:
            ConfigError: the function returned neither True nor False.
        """
        answer = self.function(name, shape)
        if type(answer) is not bool:
            raise ConfigError(
                f"ratio: {self} said {answer!r} of shape {list(shape)}, which is neither True nor "
                "False",
                tensor=name,
                cure="Let it return bool(...) of what it found",
            )
        return answer

    def __reduce__(self) -> tuple[type[Predicate], tuple[Test]]:
        return Predicate, (self.function,)  # code, which is in the key, cannot be pickled

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Predicate) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def may_be(self, other: object) -> bool:
        """Whether both have the same code, and refer to values that cannot be compared."""
        if not isinstance(other, Predicate):
            return False
        kinds = [
            getattr(each.function, "__code__", type(each.function))
            for each in (self, other)
            if each._key == id(each.function)
        ]
        return len(kinds) == 2 and kinds[0] == kinds[1]

    def __repr__(self) -> str:
        return f"predicate {getattr(self.function, '__qualname__', repr(self.function))}"


Rules = tuple[tuple[str | Predicate, float], ...]


def made_again(rules: Rules | None, before: Rules | None) -> Predicate | None:
    """Return a predicate that differs from an earlier one though both may be the same function.

    None: the rules are equal, or differ in something that can be compared.
    """
    if rules is None or before is None or len(rules) != len(before):
        return None
    pairs = [(new, old) for (new, _), (old, _) in zip(rules, before, strict=True) if new != old]
    ratios = [[ratio for _, ratio in each] for each in (rules, before)]
    doubtful = [new for new, old in pairs if isinstance(new, Predicate) and new.may_be(old)]
    alike = ratios[0] == ratios[1] and len(doubtful) == len(pairs)
    return doubtful[0] if alike and doubtful else None


def plain(value: Any) -> Any:
    """Return a number of any package, such as NumPy's, as an int or float; others as they are."""
    if value is None or isinstance(value, bool | str):
        return value
    with suppress(TypeError):  # it is no whole number
        return operator.index(value)
    return float(value) if isinstance(value, Real) else value


def make_plain(settings: Any) -> None:
    """Replace numbers in the fields of a frozen dataclass as `plain` does, before their checks."""
    for each in fields(settings):
        object.__setattr__(settings, each.name, plain(getattr(settings, each.name)))


def checked_ratio(ratio: object, name: str = "ratio") -> float:
    """Return a ratio as a float in (0, 1].

    Args:
        ratio: the user's value.
        name: the setting's name, for the error's message.

    Raises:
        ConfigError: it is not a number in (0, 1].
    """
    if isinstance(ratio, bool) or not isinstance(ratio, Real):
        raise ConfigError(
            f"{name}={ratio!r} is not a number",
            cure=f"Pass a float in (0, 1], such as {name}=0.01",
        )
    given, ratio = ratio, float(ratio)
    if isinstance(given, Integral) and ratio > 1:
        raise ConfigError(
            f"{name}={given} is above 1; {name} is the share of elements sent, not the reduction",
            cure=f"For {ratio:g} times fewer elements pass {name}={1 / ratio:.6g}",
        )
    if not 0.0 < ratio <= 1.0:  # also refuses NaN
        raise ConfigError(
            f"{name}={given!r} lies outside (0, 1]",
            cure=f"Pass the share of elements to send, such as {name}=0.01; {name}=1.0 sends all",
        )
    return ratio


def checked_rules(asked: object) -> Rules | None:
    """Return rules in the order in which they are tried; None if there are none.

    Args:
        asked: a mapping or a sequence of pairs, from a pattern or a function to a ratio or "dense".

    Raises:
        ConfigError: it is neither, or one of its patterns or ratios is not valid.
    """
    if asked is None:
        return None
    pairs = list(asked.items()) if isinstance(asked, Mapping) else asked
    if isinstance(pairs, Sequence) and not isinstance(pairs, str) and all(map(_is_pair, pairs)):
        return tuple(_checked_rule(*pair) for pair in pairs) or None
    raise ConfigError(
        f"ratio={asked!r} is neither a mapping nor pairs (pattern, ratio)",
        cure="Pass a ratio for each pattern of names, such as "
        "ratio={'embedding.*': 0.001, 'head.*': 'dense'}",
    )


def resolve(
    rules: Rules, tensors: Mapping[str, Shape], names: Collection[str]
) -> tuple[tuple[Exactly, float], ...]:
    """Return the names and ratios of the tensors that a rule matches.

    Args:
        rules: the rules, in order.
        tensors: shapes by name.
        names: names that patterns may match: those of `tensors`, and of tensors that are not
            compressed at present.

    Raises:
        ConfigError: a pattern matches no name, or only names that an earlier pattern matches; or a
            predicate returned neither True nor False.
    """
    _check_patterns([pattern for pattern, _ in rules if isinstance(pattern, str)], names)
    found = ((name, _first(rules, name, shape)) for name, shape in tensors.items())
    return tuple((Exactly(name), ratio) for name, ratio in found if ratio is not None)


def _is_pair(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2


def _checked_rule(pattern: object, ratio: object) -> tuple[str | Predicate, float]:
    if not isinstance(pattern, str | Predicate):
        if not callable(pattern):
            raise ConfigError(
                f"ratio: {pattern!r} is neither a pattern of names nor a predicate",
                cure="Pass a string such as 'head.*', or a function of a tensor's name and shape "
                "such as lambda name, shape: len(shape) == 1",
            )
        pattern = Predicate(pattern)
    if isinstance(ratio, str) and ratio != DENSE:
        raise ConfigError(
            f"ratio[{pattern!r}]={ratio!r} is neither a number nor 'dense'",
            cure="Pass a float in (0, 1], or 'dense' to send all elements",
        )
    return pattern, checked_ratio(1.0 if ratio == DENSE else ratio, f"ratio[{pattern!r}]")


def _first(rules: Rules, name: str, shape: Shape) -> float | None:
    return next((ratio for pattern, ratio in rules if _holds(pattern, name, shape)), None)


def _holds(pattern: str | Predicate, name: str, shape: Shape) -> bool:
    return pattern(name, shape) if isinstance(pattern, Predicate) else _matches(pattern, name)


def _matches(pattern: str, name: str) -> bool:
    return name == pattern if isinstance(pattern, Exactly) else fnmatchcase(name, pattern)


def _check_patterns(patterns: Sequence[str], names: Collection[str]) -> None:
    """Refuse a pattern without effect, such as a typing error or a wrong order."""
    taken = set[str]()
    for pattern in patterns:
        matched = {name for name in names if _matches(pattern, name)}
        if not matched:
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.0)
            raise ConfigError(
                f"ratio: the pattern {pattern!r} matches none of {len(names)} tensors",
                cure=f"Pass one that does, of names such as {', '.join(map(repr, near))}; * stands "
                "for any characters, dots and slashes too",
            )
        if matched <= taken:
            raise ConfigError(
                f"ratio: all that the pattern {pattern!r} matches, {min(matched)!r} for one, an "
                "earlier pattern matches too, and the first wins",
                cure="Pass it before that one, or leave it out",
            )
        taken |= matched


def _key_of(function: Any) -> object:
    """Return a key that is equal for equal functions; the function's id if in doubt."""
    key: object = id(function)
    kind: Any = type(function)
    if isinstance(function, partial):
        named = tuple(sorted(function.keywords.items()))
        key = partial, _key_of(function.func), function.args, named
    elif isinstance(function, FunctionType):
        with suppress(ValueError):  # a cell that is not assigned yet
            cells = tuple(cell.cell_contents for cell in function.__closure__ or ())
            named = tuple((function.__kwdefaults__ or {}).items())
            key = function.__code__, function.__defaults__, named, cells
    elif kind.__eq__ is not object.__eq__:
        key = function  # a method, or an object that says what it equals
    try:
        hash(key)
    except TypeError:  # a mutable value
        return id(function)
    return key
