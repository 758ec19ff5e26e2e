"""Confidence intervals for the mean of paired differences.

With fewer than five seeds the interval is Student's t, and all seeds have to agree as well. With
five or more it is the wider one of Student's t and the studentised bootstrap (Efron and Tibshirani
1993, chapter 12): with five seeds each alone reports false differences too often, Student's t for
skewed differences, the bootstrap for others. The percentile bootstrap does so in every sixth case.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

FEWEST = 5  # seeds for the bootstrap
RESAMPLES = 9_999
NO_SPREAD = 6  # equal differences that are enough, as in a sign test; accuracies may be equal
ROUNDING = 1e-12  # rounding error of differences that should be zero
BETTER, WORSE, UNCLEAR = "better", "worse", "cannot tell"


@dataclass(frozen=True)
class Difference:
    """Differences paired by seed, their mean, and an interval for it."""

    values: tuple[float, ...]  # positive: better
    low: float  # -inf: unknown
    high: float  # inf: unknown

    @property
    def mean(self) -> float:
        """The mean over seeds; NaN without any."""
        return math.fsum(self.values) / len(self.values) if self.values else math.nan

    @property
    def word(self) -> str:
        """BETTER, WORSE or UNCLEAR."""
        disagree = not (all(v > 0 for v in self.values) or all(v < 0 for v in self.values))
        if len(self.values) < FEWEST and disagree:
            return UNCLEAR
        if self.low > 0:
            return BETTER
        return WORSE if self.high < 0 else UNCLEAR


def difference(values: Sequence[float], level: float = 0.95) -> Difference:
    """The confidence interval of the mean of some differences, at a level.

    Needs NumPy and SciPy.
    """
    found = tuple(0.0 if abs(value) < ROUNDING else float(value) for value in values)
    if set(found) == {0.0}:
        return Difference(found, 0.0, 0.0)
    if len(found) < 2 or (len({*found}) == 1 and len(found) < NO_SPREAD):
        return Difference(found, -math.inf, math.inf)
    ends = [_student(found, level)]
    if len(found) >= FEWEST:
        ends.append(_bootstrap(found, level))
    return Difference(found, min(low for low, _ in ends), max(high for _, high in ends))


def _student(values: Sequence[float], level: float) -> tuple[float, float]:
    stats: Any = importlib.import_module("scipy.stats")
    mean, error = _mean_and_error(values)
    reach = float(stats.t.ppf((1 + level) / 2, len(values) - 1)) * error
    return mean - reach, mean + reach


def _bootstrap(values: Sequence[float], level: float) -> tuple[float, float]:
    np: Any = importlib.import_module("numpy")
    mean, error = _mean_and_error(values)
    generator, count = np.random.default_rng(0), len(values)
    drawn = np.asarray(values)[generator.integers(0, count, (RESAMPLES, count))]
    errors = drawn.std(axis=1, ddof=1) / math.sqrt(count)
    gaps = drawn.mean(axis=1) - mean
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where(errors > 1e-12 * abs(error), gaps / errors, np.sign(gaps) * np.inf)
    tail = (1 - level) / 2
    low, high = np.quantile(t, [tail, 1 - tail], method="nearest")
    return mean - float(high) * error, mean - float(low) * error


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    count = len(values)
    mean = math.fsum(values) / count
    spread = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return mean, math.sqrt(spread / count)
