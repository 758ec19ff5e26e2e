"""Times calls in turns: the one loop that commands and benchmarks share."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

Measured = TypeVar("Measured")
NEVER_LEFT_OUT: Mapping[str, int] = MappingProxyType({})


def in_turns(
    measures: Mapping[str, Callable[[], Measured]],
    repeats: int,
    *,
    warm_up: int = 0,
    one_in: Mapping[str, int] = NEVER_LEFT_OUT,
) -> dict[str, list[Measured]]:
    """Measure everything once a turn, so that other load on the machine slows all of it alike.

    Args:
        measures: by name, calls that return what they have measured, such as `clocked` makes.
        repeats, warm_up: turns whose results are returned, and turns before them.
        one_in: measures that take one turn in so many, by name.
    """
    found: dict[str, list[Measured]] = {name: [] for name in measures}
    for turn in range(-warm_up, repeats):
        for name, measure in measures.items():
            if turn < 0 or turn % one_in.get(name, 1) == 0:
                result = measure()
                if turn >= 0:
                    found[name].append(result)
    return found


def clocked(
    call: Callable[[], object],
    before: Callable[[], object] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Callable[[], float]:
    """A call that returns its seconds.

    before: what runs first and is not timed, such as a barrier of all ranks.
    """

    def run() -> float:
        if before is not None:
            before()
        began = clock()
        call()
        return clock() - began

    return run


def repeated(measure: Callable[[], Measured], repeats: int, warm_up: int = 0) -> list[Measured]:
    """What one measure returns in each repeat after its warm-up."""
    return in_turns({"": measure}, repeats, warm_up=warm_up)[""]


def slowest(ranks: Sequence[Sequence[float]]) -> list[float]:
    """The seconds of the slowest rank in each repeat, from those of every rank."""
    return list(map(max, zip(*ranks, strict=True)))
