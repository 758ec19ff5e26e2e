"""The goals for bytes on the card, and whether they are met."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from wire.figures import Figures, reductions, reductions_of_exchanges
from wire.ways import EXCHANGES, VALUES, name_of

ByHosts = dict[int, dict[str, Figures]]  # number of hosts -> way -> figures

INT8 = name_of("sharded", "int8", 0.01)
INT4 = name_of("sharded", "int4", 0.01)


@dataclass(frozen=True)
class Verdict:
    """A goal and what was measured."""

    goal: str
    measured: str
    met: str


YES, NO, WITHOUT = "yes", "**no**", "without negotiation"


def verdicts(found: ByHosts) -> Iterator[Verdict]:
    """Each goal, over all numbers of hosts with results."""
    yield _reduction(found, INT8, 165)
    yield _reduction(found, INT4, 220)
    if len(found) > 1:
        for values in VALUES:
            yield _growth(found, name_of("sharded", values, 0.01), 2.0)
    for values in ("int8", "int4"):
        yield _reduction(found, name_of("sharded", values, 0.001, 0), 1000)
    if _are_counted(found):
        yield _agreement(found, 0.05)


def _are_counted(found: ByHosts) -> bool:
    """Whether cycles were counted, so that negotiation can be subtracted."""
    return all(way.exchanged is not None for ways in found.values() for way in ways.values())


def _reduction(found: ByHosts, way: str, least: float) -> Verdict:
    counted, at = _least({hosts: reductions(ways)[way] for hosts, ways in found.items()})
    goal = f"{way}: at least {least:,.0f}x fewer bytes than dense, for every number of hosts"
    measured = f"{counted:,.0f}x ({at} hosts)"
    if not _are_counted(found):
        return Verdict(goal, measured, YES if counted >= least else NO)
    each = {hosts: reductions_of_exchanges(ways)[way] for hosts, ways in found.items()}
    exchanged, where = _least(each)
    measured += f", without negotiation {exchanged:,.0f}x ({where} hosts)"
    met = YES if counted >= least else WITHOUT if exchanged >= least else NO
    return Verdict(goal, measured, met)


def _least(by_hosts: dict[int, float]) -> tuple[float, int]:
    """The least value, and its number of hosts."""
    hosts = min(by_hosts, key=lambda count: by_hosts[count])
    return by_hosts[hosts], hosts


def _growth(found: ByHosts, way: str, most: float) -> Verdict:
    few, many = min(found), max(found)
    grown = found[many][way].card / found[few][way].card
    goal = f"{way}: at {many} hosts at most {most:g} times the bytes at {few}"
    return Verdict(goal, f"{grown:.2f} times", YES if grown <= most else NO)


def _agreement(found: ByHosts, most: float) -> Verdict:
    """Bytes carried for each byte of `stats()`, and the constant bytes of a step."""
    each = [
        (_line([way for name, way in ways.items() if name.startswith(exchange)]), exchange, hosts)
        for hosts, ways in found.items()
        for exchange in EXCHANGES
    ]
    (slope, _), *where = max(each, key=lambda one: abs(one[0][0] - 1))
    (_, framing), *largest = max(each, key=lambda one: one[0][1])
    goal = f"the slope of bytes carried against `stats()` is within {most:.0%} of 1"
    worst = f"at worst {slope - 1:+.1%} ({where[0]}, {where[1]} hosts)"
    most_framing = f"plus at most {framing:,.0f} bytes a step ({largest[0]}, {largest[1]} hosts)"
    return Verdict(goal, f"{worst} {most_framing}", YES if abs(slope - 1) <= most else NO)


def _line(ways: list[Figures]) -> tuple[float, float]:
    """Slope and intercept of the bytes carried against the bytes of `stats()`."""
    points = [(way.stats, way.carried) for way in ways if way.stats and way.carried]
    fitted = statistics.linear_regression(*zip(*points, strict=True))
    return fitted.slope, fitted.intercept
