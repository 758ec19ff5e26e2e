"""The verdict on each compressor compared with dense: the rule of docs/compare.md.

Quality at equal steps is compared with dense float32. The time to reach the quality that both runs
of a pair reach is compared with every dense baseline. A compressor

    pays               reaches it sooner than every dense baseline, and ends no worse than float32
    is faster, worse   reaches it sooner than every dense baseline, and ends worse
    does not pay       reaches it later than some dense baseline, or is as slow and ends worse
    cannot tell        otherwise

"Sooner", "later" and "worse" mean that the interval excludes zero; see `uncertainty`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from horovod_topk.cli.compare.curves import Curve, Metric, at_step, at_time, reach
from horovod_topk.cli.compare.records import DIVERGED, DONE, FAILED, LATE, STOPPED, Record
from horovod_topk.cli.compare.uncertainty import BETTER, UNCLEAR, WORSE, Difference, difference

PAYS, FASTER, NOT, UNKNOWN = "pays", "faster, but ends worse", "does not pay", "cannot tell"
TRUST = 0.95

NO_DIFFERENCE = Difference((), -math.inf, math.inf)

Runs = Mapping[int, Record]  # runs of one compressor, by seed


@dataclass(frozen=True)
class Beside:
    """A compressor compared with one baseline, paired by seed."""

    steps: Difference  # quality at equal steps, in units of the metric
    time: Difference | None  # quality at equal wall-clock time; None: no common time
    sooner: Difference  # log(baseline's seconds / compressor's seconds) to the common quality


@dataclass(frozen=True)
class Verdict:
    """The verdict on one compressor."""

    word: str  # PAYS, FASTER, NOT or UNKNOWN; or the outcome of a run that is not done
    because: str
    beside: Mapping[str, Beside]  # by baseline


def judge(
    runs: Runs,
    baselines: Mapping[str, Runs],
    metric: Metric,
    budget: float | None = None,
    *,
    timed: bool = True,
) -> Verdict:
    """The verdict on a compressor.

    Args:
        baselines: runs of the dense baselines, float32 first.
        budget: seconds at which quality is compared; None: the end of the faster run of each pair.
        timed: whether times are meaningful; if not, the verdict is on quality at equal steps.
    """
    outcomes = {seed: run.outcome(metric.name) for seed, run in sorted(runs.items())}
    for outcome in (FAILED, LATE, DIVERGED, STOPPED):
        seeds = [str(seed) for seed, each in outcomes.items() if each == outcome]
        if seeds:
            return Verdict(outcome, f"with seed {', '.join(seeds)}", {})
    level = 1 - (1 - TRUST) / len(baselines)
    beside = {
        name: _beside(runs, dense, metric, budget, level) for name, dense in baselines.items()
    }
    if not timed:
        quality = {name: Beside(each.steps, None, NO_DIFFERENCE) for name, each in beside.items()}
        word = next(iter(quality.values())).steps.word
        return Verdict(word, "quality at equal steps", quality)
    word, because = _rule(beside)
    return Verdict(word, because, beside)


def _rule(beside: Mapping[str, Beside]) -> tuple[str, str]:
    """The verdict and its reason, by the rule in the module's docstring."""
    quality = next(iter(beside.values())).steps.word
    later = [name for name, each in beside.items() if each.sooner.word == WORSE]
    unclear = [name for name, each in beside.items() if each.sooner.word == UNCLEAR]
    if later:
        return NOT, f"reaches the same quality later than {' and '.join(later)}"
    if unclear and quality == WORSE:
        return NOT, f"ends worse, and is not shown to be faster than {' and '.join(unclear)}"
    if unclear:
        return UNKNOWN, f"not shown to be sooner or later than {' and '.join(unclear)}"
    if quality == WORSE:
        return FASTER, "reaches its own quality sooner than dense, and dense ends better"
    ends = "ends better" if quality == BETTER else "is not shown to end worse"
    return PAYS, f"reaches the same quality sooner than dense, and {ends}"


def overall(verdicts: Mapping[str, Verdict]) -> str:
    """One sentence about all compressors."""
    paying = {name: v for name, v in verdicts.items() if v.word == PAYS}
    if paying:
        best = max(
            paying, key=lambda name: min(b.sooner.mean for b in paying[name].beside.values())
        )
        return f"compress with {best}"
    words = {verdict.word for verdict in verdicts.values()}
    if FASTER in words:
        return (
            "no compressor keeps dense's quality: compress only if an earlier, worse result counts"
        )
    if words <= {NOT, DIVERGED}:
        return "do not compress"
    return "cannot tell: nothing is shown to pay. More seeds or longer runs may tell"


def _beside(runs: Runs, dense: Runs, metric: Metric, budget: float | None, level: float) -> Beside:
    steps, times, sooner = [], [], []
    for ours, theirs in _pairs(runs, dense, metric):
        last = min(ours[-1][0], theirs[-1][0])
        seconds = min(ours[-1][1], theirs[-1][1]) if budget is None else budget
        steps.append(_gain(metric, at_step(ours, last), at_step(theirs, last)))
        times.append(_gain(metric, at_time(ours, seconds), at_time(theirs, seconds)))
        sooner.append(_sooner(ours, theirs, metric))
    known = [each for each in times if each is not None]
    return Beside(
        difference([each for each in steps if each is not None], TRUST),
        difference(known, TRUST) if known else None,
        difference([each for each in sooner if each is not None], level),
    )


def _pairs(runs: Runs, dense: Runs, metric: Metric) -> Iterator[tuple[Curve, Curve]]:
    """Curves of the same seed whose dense run is done."""
    for seed in sorted(runs.keys() & dense.keys()):
        ours, theirs = (each[seed].curve(metric.name) for each in (runs, dense))
        if ours and theirs and dense[seed].outcome(metric.name) == DONE:
            yield ours, theirs


def _gain(metric: Metric, ours: float | None, theirs: float | None) -> float | None:
    return None if ours is None or theirs is None else metric.gain(ours, theirs)


def _sooner(ours: Curve, theirs: Curve, metric: Metric) -> float | None:
    """Log of the ratio of times in which the runs of a pair reach their common quality."""
    common = metric.worse(ours[-1][2], theirs[-1][2])
    a, b = reach(ours, common, metric), reach(theirs, common, metric)
    return math.log(b[1] / a[1]) if a and b and a[1] > 0 and b[1] > 0 else None
