"""What finished runs say of each point: bytes, and the difference to dense, seed by seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from study.frontier import agenda, records
from study.frontier.agenda import Point, Series
from study.markdown import LEAST_FOR_ERROR, OPTIMIZERS, standard_error

TOLERANCE = {"digits": 0.5, "bytelm": 2.0}  # points of accuracy, % of bits a byte
TITLES = {"digits": "Digits CNN", "bytelm": "Byte GPT"}
UNIT = {"digits": "points", "bytelm": "%"}


@dataclass(frozen=True)
class Group:
    """Runs that are compared with each other."""

    series: Series
    shards: str
    dense: dict[int, float]  # final score, by seed
    points: tuple[Measured, ...]  # by increasing reduction
    missing: int  # runs that the agenda names and that are not finished

    @property
    def name(self) -> str:
        """Task, optimizer and shards."""
        series = self.series
        return f"{TITLES[series.workload]}, {OPTIMIZERS[series.optimizer]}, {self.shards} shards"

    @property
    def tolerance(self) -> float:
        """What a setting may cost."""
        return TOLERANCE[self.series.workload]

    def find(self, point: Point) -> Measured | None:
        """What its finished runs say; None if there are none."""
        return next((each for each in self.points if each.point == point), None)


@dataclass(frozen=True)
class Measured:
    """A point and its runs."""

    point: Point
    sent_bytes: int  # a step and rank
    reduction: float  # times fewer bytes than a ring allreduce
    scores: dict[int, float | None]  # final, by seed; None: diverged
    costs: tuple[float, ...]  # how much worse than dense, seed by seed: points or %; inf: diverged

    @property
    def cost(self) -> float:
        """The mean over seeds."""
        return statistics.mean(self.costs)

    @property
    def error(self) -> float | None:
        """The standard error of that mean; None for fewer than three seeds, or if one diverged."""
        if len(self.costs) < LEAST_FOR_ERROR or math.isinf(self.cost):
            return None
        return standard_error(self.costs)

    @property
    def reach(self) -> tuple[float, float]:
        """How far a picture's error bar goes down and up: of two seeds, to both values."""
        if self.error is not None:
            return self.error, self.error
        return self.cost - min(self.costs), max(self.costs) - self.cost


def groups() -> list[Group]:
    """Everything finished, one group for each workload, optimizer and kind of shards."""
    wanted: dict[tuple[Series, str], list[agenda.Stage]] = {}
    for stage in agenda.stages():
        wanted.setdefault((stage.series, stage.shards), []).append(stage)
    return [_group(series, shards, stages) for (series, shards), stages in wanted.items()]


def frontier(points: Iterable[Measured]) -> list[Measured]:
    """The points that no other one beats in both bytes and cost, by increasing reduction.

    None of them diverged.
    """
    best: list[Measured] = []
    trained = (each for each in points if math.isfinite(each.cost))
    for each in sorted(trained, key=lambda each: (-each.reduction, each.cost)):
        if not best or each.cost < best[-1].cost:
            best.append(each)
    return best[::-1]


def within(points: Iterable[Measured], tolerance: float) -> Measured | None:
    """The point of the largest reduction among those that cost no more than the tolerance."""
    good = [each for each in points if each.cost <= tolerance]
    return max(good, key=lambda each: each.reduction, default=None)


def _group(series: Series, shards: str, stages: Sequence[agenda.Stage]) -> Group:
    lr = agenda.chosen(series)
    if lr is None:
        cells = {cell for stage in stages for cell in stage.cells(math.nan)}
        return Group(series, shards, {}, (), len(cells))
    known = records.finished()
    cells = {cell for stage in stages for cell in stage.cells(lr)}
    dense = {
        seed: records.score(known[cell])
        for seed in series.seeds
        if (cell := series.dense(shards, lr, seed)) in known
    }
    points = dict.fromkeys(point for stage in stages for point in stage.points)
    found = (_measured(series, shards, lr, point, dense) for point in points)
    measured = sorted((each for each in found if each), key=lambda each: each.reduction)
    return Group(series, shards, dense, tuple(measured), len(cells - known.keys()))


def _measured(
    series: Series, shards: str, lr: float, point: Point, dense: dict[int, float]
) -> Measured | None:
    """A point's finished runs; None if there are none beside a finished dense one."""
    known = records.finished()
    cells = {seed: series.at(point, shards, lr, seed) for seed in dense}
    runs = {seed: known[cell] for seed, cell in cells.items() if cell in known}
    if not runs:
        return None
    first = next(iter(runs.values()))
    scores = {seed: records.score(run) for seed, run in runs.items()}
    return Measured(
        point,
        first["sent_bytes"],
        first["dense_bytes"] / first["sent_bytes"],
        scores,
        tuple(_cost(series, score, dense[seed]) for seed, score in scores.items()),
    )


def _cost(series: Series, score: float | None, dense: float) -> float:
    if score is None:
        return math.inf
    return 100 * (dense - score if series.higher_is_better else score / dense - 1)
