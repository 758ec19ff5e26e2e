"""Ratios that some tensors have of their own: `TopKConfig.ratios`, checked and resolved.

A rule is a pattern of names, or a predicate, and a ratio. Of the rules that hold for a tensor the
first wins. A plan resolves them, so that what its ranks compare and its payloads' digests cover
are ratios of tensors by name, whatever patterns or functions they came from.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from numbers import Integral, Real
from types import FunctionType
from typing import Any

from horovod_topk.errors import ConfigError

DENSE = "dense"  # in a rule, for 1.0

Shape = tuple[int, ...]
Test = Callable[[str, Shape], bool]
Asked = Mapping[Any, float | str] | Sequence[tuple[Any, float | str]]


class Exactly(str):
    """A tensor's whole name: a pattern without wildcards, whatever characters it has."""

    __slots__ = ()


class Predicate:
    """A function of a tensor's name and shape that says whether a rule holds for it.

    Equal to one of the same code, defaults and closure: settings that are written once and
    evaluated again, in each step for example, are then equal settings.
    """

    def __init__(self, function: Test) -> None:
        self.function = function
        self._key = _key_of(function)

    def __call__(self, name: str, shape: Shape) -> bool:
        """The function's answer.

        Raises:
            ConfigError: it is neither True nor False.
        """
        answer = self.function(name, shape)
        if type(answer) is not bool:
            raise ConfigError(
                f"ratios: {self} said {answer!r} of shape {list(shape)}, which is neither True nor "
                "False",
                tensor=name,
                cure="Let it return bool(...) of what it found",
            )
        return answer

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Predicate) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def may_be(self, other: object) -> bool:
        """Whether both are of the same code, and refer to what cannot be compared."""
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
    """The predicate by which rules differ from earlier ones, if they may be the same, made again.

    None: they are equal, or differ in what can be compared.
    """
    if rules is None or before is None or len(rules) != len(before):
        return None
    pairs = [(new, old) for (new, _), (old, _) in zip(rules, before, strict=True) if new != old]
    ratios = [[ratio for _, ratio in each] for each in (rules, before)]
    doubtful = [new for new, old in pairs if isinstance(new, Predicate) and new.may_be(old)]
    alike = ratios[0] == ratios[1] and len(doubtful) == len(pairs)
    return doubtful[0] if alike and doubtful else None


def checked_ratio(ratio: object, name: str = "ratio") -> float:
    """A ratio in (0, 1] as a float; `name` is the setting's.

    Raises:
        ConfigError: it is none.
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
    """Rules in the order in which they are tried; None where there are none.

    Args:
        asked: a mapping, or pairs, of a pattern or a predicate and a ratio or "dense".

    Raises:
        ConfigError: it is none, or a pattern or ratio of it is none.
    """
    if asked is None:
        return None
    pairs = list(asked.items()) if isinstance(asked, Mapping) else asked
    if isinstance(pairs, Sequence) and not isinstance(pairs, str) and all(map(_is_pair, pairs)):
        return tuple(_checked_rule(*pair) for pair in pairs) or None
    raise ConfigError(
        f"ratios={asked!r} is neither a mapping nor pairs (pattern, ratio)",
        cure="Pass a ratio for each pattern of names, such as "
        "ratios={'embedding.*': 0.001, 'head.*': 'dense'}, or pairs of these, or None",
    )


def resolve(
    rules: Rules, tensors: Mapping[str, Shape], names: Collection[str]
) -> tuple[tuple[Exactly, float], ...]:
    """The rule that wins for each tensor, if one does.

    Args:
        rules: what was asked.
        tensors: shapes by name.
        names: what patterns may match: more than `tensors`, where some take no part at present.

    Raises:
        ConfigError: a pattern matches no name, or none that an earlier one does not match; or a
            predicate said neither True nor False.
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
                f"ratios: {pattern!r} is neither a pattern of names nor a predicate",
                cure="Pass a string such as 'head.*', or a function of a tensor's name and shape "
                "such as lambda name, shape: len(shape) == 1",
            )
        pattern = Predicate(pattern)
    if isinstance(ratio, str) and ratio != DENSE:
        raise ConfigError(
            f"ratios[{pattern!r}]={ratio!r} is neither a number nor 'dense'",
            cure="Pass a float in (0, 1], or 'dense' to send all elements",
        )
    return pattern, checked_ratio(1.0 if ratio == DENSE else ratio, f"ratios[{pattern!r}]")


def _first(rules: Rules, name: str, shape: Shape) -> float | None:
    return next((ratio for pattern, ratio in rules if _holds(pattern, name, shape)), None)


def _holds(pattern: str | Predicate, name: str, shape: Shape) -> bool:
    return pattern(name, shape) if isinstance(pattern, Predicate) else _matches(pattern, name)


def _matches(pattern: str, name: str) -> bool:
    return name == pattern if isinstance(pattern, Exactly) else fnmatchcase(name, pattern)


def _check_patterns(patterns: Sequence[str], names: Collection[str]) -> None:
    """Refuse what would change nothing: it was meant to."""
    taken = set[str]()
    for pattern in patterns:
        matched = {name for name in names if _matches(pattern, name)}
        if not matched:
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.0)
            raise ConfigError(
                f"ratios: the pattern {pattern!r} matches none of {len(names)} tensors",
                cure=f"Pass one that does, of names such as {', '.join(map(repr, near))}; * stands "
                "for any characters, dots and slashes too",
            )
        if matched <= taken:
            raise ConfigError(
                f"ratios: all that the pattern {pattern!r} matches, {min(matched)!r} for one, an "
                "earlier pattern matches too, and the first wins",
                cure="Pass it before that one, or leave it out",
            )
        taken |= matched


def _key_of(function: Test) -> object:
    """What is equal for functions that are the same; the function itself if in doubt."""
    if isinstance(function, FunctionType) and not function.__kwdefaults__:
        try:
            cells = tuple(cell.cell_contents for cell in function.__closure__ or ())
            key = function.__code__, function.__defaults__, cells
            hash(key)
        except (TypeError, ValueError):  # a mutable value, or one that is not there yet
            return id(function)
        return key
    return id(function)
