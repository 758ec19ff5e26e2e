"""Whether compression pays, and up to which bandwidth."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from horovod_topk.cost.machine import Machine
from horovod_topk.cost.quantities import milliseconds, rate
from horovod_topk.cost.step import Step, Training, step
from horovod_topk.cost.ways import Way

SLOWEST, FASTEST = 1e4, 1e14  # bit/s, between which ways are compared
TOO_COARSE = "sign"  # values with which training diverged, docs/frontier.md: not recommended
PRECISE = 1e-9  # of a logarithm of bits a second


@dataclass(frozen=True)
class Row:
    """What a way costs."""

    way: Way
    alone: Step  # without overlap
    overlapped: Step
    crossing: float  # bit/s above which dense is as fast; 0: it always is, inf: it never is


@dataclass(frozen=True)
class Verdict:
    """Whether to compress, and why."""

    compress: bool
    text: str


def rows(ways: Sequence[Way], machine: Machine, training: Training, *, overlap: bool) -> list[Row]:
    """Of every way; the first is the one that the others are compared with.

    overlap: whether steps with overlap are compared, or those without.
    """
    return [
        Row(
            way,
            step(way, machine, training, overlap=False),
            step(way, machine, training, overlap=True),
            crossing(ways[0], way, machine, training, overlap=overlap),
        )
        for way in ways
    ]


def crossing(
    dense: Way, other: Way, machine: Machine, training: Training, *, overlap: bool
) -> float:
    """The bandwidth at which two ways take equally long: below it `other` is faster.

    0 where `dense` is never slower, infinity where it always is (within `SLOWEST` to `FASTEST`).
    """

    def gain(bandwidth: float) -> float:
        there = replace(machine, network=replace(machine.network, bandwidth=bandwidth))
        slow, fast = (step(w, there, training, overlap=overlap) for w in (dense, other))
        return slow.seconds - fast.seconds

    if gain(SLOWEST) <= 0:
        return 0.0
    if gain(FASTEST) > 0:
        return math.inf
    return math.exp(_bisect(lambda x: gain(math.exp(x)), math.log(SLOWEST), math.log(FASTEST)))


def _bisect(function: Callable[[float], float], positive: float, negative: float) -> float:
    """Where a function's sign changes between two arguments."""
    while abs(negative - positive) > PRECISE:
        middle = (positive + negative) / 2
        if function(middle) > 0:
            positive = middle
        else:
            negative = middle
    return (positive + negative) / 2


def judge(table: Sequence[Row], *, overlap: bool) -> Verdict:
    """Of `rows`: dense against the fastest of ours, of which some must not be `TOO_COARSE`.

    What is neither is named where it is faster than both.
    """

    def taken(row: Row) -> Step:
        return row.overlapped if overlap else row.alone

    dense = table[0]
    ours = [row for row in table if row.way.ours and row.way.values != TOO_COARSE]
    best = min(ours, key=lambda row: taken(row).seconds)
    slow, fast = taken(dense), taken(best)
    others = {_title(row): taken(row) for row in table[1:] if not row.way.ours}
    besides = _besides(others, min(slow.seconds, fast.seconds))
    if fast.seconds < slow.seconds:
        return Verdict(True, _pays(best, slow, fast) + besides)
    return Verdict(False, _does_not_pay(best, slow, fast) + besides)


def _pays(best: Row, slow: Step, fast: Step) -> str:
    until = "at any bandwidth" if math.isinf(best.crossing) else f"below {rate(best.crossing)}"
    return (
        f"compress: exchange={best.way.exchange!r}, values={best.way.values!r} makes a step "
        f"{slow.seconds / fast.seconds:.2f} times faster than dense ({milliseconds(slow.seconds)} "
        f"to {milliseconds(fast.seconds)} ms), and pays {until}."
    )


def _besides(others: Mapping[str, Step], least: float) -> str:
    """A word for each other compression that takes less than so many seconds."""
    return "".join(
        f" {name} is faster still: {milliseconds(other.seconds)} ms."
        for name, other in others.items()
        if other.seconds < least
    )


def _title(row: Row) -> str:
    return "Horovod's own fp16" if row.way.exchange == "allreduce" else row.way.name


def _does_not_pay(best: Row, slow: Step, fast: Step) -> str:
    saved, spent = slow.exchange - fast.exchange, fast.kernels - slow.kernels
    if saved <= 0:
        reason = f"its collectives take no less than dense's {milliseconds(slow.exchange)} ms"
    elif slow.hidden == 1.0:
        reason = "backward hides all of dense's exchange"
    else:
        reason = (
            f"it sends in {milliseconds(fast.exchange)} ms what takes dense "
            f"{milliseconds(slow.exchange)}, and computes {milliseconds(spent)} ms for it"
        )
    where = f" It would pay below {rate(best.crossing)}." if best.crossing else ""
    return (
        f"do not compress: dense takes {milliseconds(slow.seconds)} ms a step, the fastest of ours "
        f"({best.way.name}) {milliseconds(fast.seconds)}: {reason}.{where}"
    )
