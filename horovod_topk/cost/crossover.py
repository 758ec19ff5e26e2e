"""The crossover: bandwidths at which an exchange is faster than dense.

Usually these are all bandwidths below a limit, because fewer bytes save more time on a slower
network. An exchange with fewer messages and more bytes is faster above a limit, or between two.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from horovod_topk.cost.machine import Machine
from horovod_topk.cost.quantities import rate
from horovod_topk.cost.step import Training, step
from horovod_topk.cost.strategies import Strategy

DECADES = [10.0**power for power in range(4, 15)]  # bit/s, at which strategies are compared first
PRECISE = 1e-9  # precision of a logarithm of bit/s


@dataclass(frozen=True)
class Span:
    """A range of bandwidths, in bit/s."""

    above: float  # 0: no lower limit within `DECADES`
    below: float  # infinity: no upper limit

    def __str__(self) -> str:
        if math.isinf(self.below):
            return f"above {rate(self.above)}" if self.above else "at any bandwidth"
        if self.above:
            return f"between {rate(self.above)} and {rate(self.below)}"
        return f"below {rate(self.below)}"


def written(spans: Iterable[Span]) -> str:
    """Join ranges to text, for use in a sentence."""
    return " and ".join(map(str, spans))


def faster(
    beside: Sequence[Strategy],
    strategy: Strategy,
    machine: Machine,
    training: Training,
    *,
    overlap: bool,
) -> tuple[Span, ...]:
    """Return the ranges, ascending, where a strategy is faster than all others; empty if none."""

    def gain(bandwidth: float) -> float:
        there = replace(machine, network=replace(machine.network, bandwidth=bandwidth))
        fast, *slow = (
            step(each, there, training, overlap=overlap).seconds for each in (strategy, *beside)
        )
        return min(slow) - fast

    return tuple(_spans(gain, sorted({*DECADES, machine.network.bandwidth})))


def _spans(gain: Callable[[float], float], places: list[float]) -> Iterator[Span]:
    """Ranges in which a gain is above 0; its sign changes at most once between two places."""
    gains = [gain(place) > 0 for place in places]
    above = 0.0
    pairs = itertools.pairwise(zip(places, gains, strict=True))
    for (left, before), (right, after) in pairs:
        if after and not before:
            above = _change(gain, right, left)
        elif before and not after:
            yield Span(above, _change(gain, left, right))
    if gains[-1]:
        yield Span(above, math.inf)


def _change(gain: Callable[[float], float], positive: float, negative: float) -> float:
    """The bandwidth between two others at which a gain changes its sign."""
    more, less = math.log(positive), math.log(negative)
    while abs(less - more) > PRECISE:
        middle = (more + less) / 2
        if gain(math.exp(middle)) > 0:
            more = middle
        else:
            less = middle
    return math.exp((more + less) / 2)
