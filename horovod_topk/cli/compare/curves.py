"""Quality along a run: at a step, at a time, and the time to reach a quality.

A curve is a list of (step, seconds, value), in the order of steps. Values between two reports are
interpolated linearly.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

Curve = Sequence[tuple[int, float, float]]


@dataclass(frozen=True)
class Metric:
    """The metric that is compared, and its direction."""

    name: str
    higher_is_better: bool

    def gain(self, value: float, beside: float) -> float:
        """How much better one value is than another; negative if it is worse."""
        return value - beside if self.higher_is_better else beside - value

    def worse(self, *values: float) -> float:
        """The worst of some values."""
        return min(values) if self.higher_is_better else max(values)

    def reached(self, value: float, target: float) -> bool:
        """Whether a value is at least as good as a target."""
        return self.gain(value, target) >= 0


def at_step(curve: Curve, step: float) -> float | None:
    """The value after a step; None: the curve ends before."""
    return _interpolated([(float(s), value) for s, _, value in curve], step)


def at_time(curve: Curve, seconds: float) -> float | None:
    """The value after so many seconds; None: the curve is empty.

    After the end it is the last value, and before the first report the first value, which is
    optimistic if training improves.
    """
    if curve and seconds >= curve[-1][1]:
        return curve[-1][2]
    if curve and seconds <= curve[0][1]:
        return curve[0][2]
    return _interpolated([(t, value) for _, t, value in curve], seconds)


def reach(curve: Curve, target: float, metric: Metric) -> tuple[float, float] | None:
    """Steps and seconds until a curve first is as good as a target; None: it never is."""
    before: tuple[int, float, float] | None = None
    for step, seconds, value in curve:
        if metric.reached(value, target):
            if before is None or value == before[2]:
                return float(step), seconds
            share = (target - before[2]) / (value - before[2])
            return before[0] + share * (step - before[0]), before[1] + share * (seconds - before[1])
        before = step, seconds, value
    return None


def _interpolated(points: Sequence[tuple[float, float]], x: float) -> float | None:
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x0 <= x <= x1:
            return y0 if x1 == x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return points[0][1] if len(points) == 1 and x == points[0][0] else None
