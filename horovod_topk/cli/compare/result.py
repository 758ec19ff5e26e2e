"""Results of a comparison: for each variant of the grid, figures and verdicts."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from horovod_topk.cli.compare.curves import Metric, at_time, reach
from horovod_topk.cli.compare.records import DONE, Record
from horovod_topk.cli.compare.settings import CompareSettings, metric_of
from horovod_topk.cli.compare.verdict import Runs, Verdict, judge, overall

HALF = 0.5  # bytes of fp16 / bytes of float32


@dataclass(frozen=True)
class Row:
    """A compressor's figures: means over the seeds whose runs are done."""

    name: str
    compressor: str
    outcomes: Mapping[int, str]  # by seed
    final: float | None  # quality at the last step
    at_time: float | None  # quality at the common time
    seconds: float | None  # per step
    waited: float | None  # seconds per step of waiting for gradients
    bytes: float | None  # per step and rank
    to_target: float | None  # seconds; None: not all seeds reach the target
    bytes_to_target: float | None
    memory: float | None  # bytes, the largest peak of rank 0
    verdict: Verdict | None  # None: a baseline


@dataclass(frozen=True)
class Found:
    """The results of one variant of the grid."""

    settings: CompareSettings
    variant: tuple[tuple[str, Any], ...]
    metric: Metric
    runs: Mapping[str, Runs]  # by name of the row
    rows: tuple[Row, ...]
    budget: float | None  # seconds at which `at_time` is taken
    sentence: str


def found_in(
    settings: CompareSettings,
    records: Mapping[str, Runs],
    variant: tuple[tuple[str, Any], ...] = (),
) -> Found:
    """Compute the figures and verdicts of one variant's runs."""
    every = [run for runs in records.values() for run in runs.values()]
    reported = sorted({name for run in every for point in run.points for name in point.metrics})
    metric = metric_of(settings.metric, reported)
    baselines = {name: records[name] for name in settings.baselines if records.get(name)}
    verdicts = {
        name: judge(records[name], baselines, metric, settings.budget, timed=not settings.simulated)
        for name in settings.compressors
        if records.get(name) and baselines
    }
    budget = None if settings.simulated else settings.budget or _common_time(every, metric)
    dense = next((run.dense_bytes for run in every if run.dense_bytes), None)  # of any run
    rows = tuple(
        _row(settings, name, runs, metric, budget, dense, baselines, verdicts.get(name))
        for name, runs in records.items()
        if runs
    )
    sentence = overall(verdicts) if verdicts and not settings.simulated else ""
    return Found(settings, variant, metric, records, rows, budget, sentence)


def _row(
    settings: CompareSettings,
    name: str,
    runs: Runs,
    metric: Metric,
    budget: float | None,
    dense: float | None,
    baselines: Mapping[str, Runs],
    verdict: Verdict | None,
) -> Row:
    good = {seed: run for seed, run in runs.items() if run.outcome(metric.name) == DONE}
    curves = {seed: run.curve(metric.name) for seed, run in good.items()}
    size = _bytes(settings.rows[name], list(good.values()), dense)
    targets = {seed: _target(settings, baselines, seed, metric) for seed in good}
    pairs = [(curves[seed], targets[seed]) for seed in good]
    reached = [None if t is None else reach(curve, t, metric) for curve, t in pairs]
    steps = [each[0] for each in reached if each is not None]
    times = [each[1] for each in reached if each is not None]
    complete = bool(reached) and len(times) == len(reached)
    return Row(
        name,
        settings.rows[name],
        {seed: run.outcome(metric.name) for seed, run in runs.items()},
        _mean([curve[-1][2] for curve in curves.values() if curve]),
        None if budget is None else _mean([at_time(each, budget) for each in curves.values()]),
        None if settings.simulated else _mean([run.seconds_per_step for run in good.values()]),
        _mean([run.waited for run in good.values()]),
        size,
        _mean(times) if complete and not settings.simulated else None,
        size * statistics.fmean(steps) if complete and size else None,
        max((run.peak_memory for run in good.values() if run.peak_memory), default=None),
        verdict,
    )


def _target(
    settings: CompareSettings, baselines: Mapping[str, Runs], seed: int, metric: Metric
) -> float | None:
    """The target of a seed: the user's, or the worse final quality of the dense runs."""
    if settings.target is not None:
        return settings.target
    runs = [each[seed] for each in baselines.values() if seed in each]
    curves = [run.curve(metric.name) for run in runs if run.outcome(metric.name) == DONE]
    ends = [curve[-1][2] for curve in curves if curve]
    return metric.worse(*ends) if ends else None


def _common_time(runs: Sequence[Record], metric: Metric) -> float | None:
    curves = [run.curve(metric.name) for run in runs if run.outcome(metric.name) == DONE]
    return min((curve[-1][1] for curve in curves if curve), default=None)


def _bytes(compressor: str, runs: Sequence[Record], dense: float | None) -> float | None:
    """Bytes per step and rank: counted, or for Horovod's compression computed."""
    counted = _mean([run.sent_bytes for run in runs])
    if counted is not None or dense is None:
        return counted
    return dense * (HALF if compressor == "fp16" else 1.0)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None
