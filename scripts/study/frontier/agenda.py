"""What the study trains: sweeps, dense runs, and points of the frontier, the most useful first.

Points come as a grid (every format, exchange and ratio) or at equal bytes: for each format and
exchange, the largest ratio that still sends so many times fewer bytes than dense.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product

from horovod_topk.methods.topk import TopK
from study import results
from study.frontier import records
from study.frontier.ablated import FEEDBACK, MASKING, OWNERS
from study.frontier.cells import RANKS, Cell, dense
from study.frontier.exchanges import counted_bytes, exchange_of, plan_of
from study.frontier.loopback import Loopback
from study.frontier.workloads import WORKLOADS

EXCHANGES = ("allgather", "sharded")  # of ranks that are a node each
NODES = "hierarchical"  # of nodes of two ranks
RATIOS = (0.001, 0.003, 0.01, 0.03, 0.1)
ENDS = (RATIOS[0], RATIOS[-1])  # what lies between is measured at equal bytes
FINE_RATIOS = tuple(round(m * 10.0**e, 6) for e in (-4, -3, -2) for m in range(10, 100))
FORMATS = ("float32", "int8", "int4", "sign")
HALVES = ("float16", "bfloat16")
GOALS = (50.0, 165.0)  # times fewer bytes than dense
MOMENTUM = 0.9  # of SGD, and of momentum correction
RECIPE_STEPS = (1000, 2000, 8000)  # besides those of the series
SHARES = (0.5, 2.0)  # gather_ratio over ratio, where owners send back another share


@dataclass(frozen=True)
class Point:
    """A setting of TopKEF."""

    exchange: str
    values: str
    ratio: float
    momentum: float = 0.0  # of momentum correction
    gather_ratio: float | None = None  # what owners of shards send back; None: as `ratio`


_CONFIG = TopK()
DEFAULT = Point(_CONFIG.exchange, _CONFIG.values, _CONFIG.ratio)
RECIPE = Point("allgather", "int4", 0.024, MOMENTUM)
PLAIN = replace(RECIPE, momentum=0.0)
SHARDED = Point("sharded", "int4", DEFAULT.ratio)


@dataclass(frozen=True)
class Series:
    """A workload with an optimizer, and the sweep that finds dense's learning rate."""

    workload: str
    optimizer: str
    steps: int
    grid: tuple[float, ...]  # learning rates to try at first
    sweep_seeds: tuple[int, ...]  # not those of the comparisons
    seeds: tuple[int, ...]  # of the comparisons

    @property
    def higher_is_better(self) -> bool:
        """Whether a larger score is the better one."""
        return WORKLOADS[self.workload].higher_is_better

    def sweep(self, lr: float) -> list[Cell]:
        """Dense runs at one learning rate, scored on validation data."""
        common = (self.workload, self.optimizer, "equal", lr, self.steps)
        return [dense(*common, seed, "validation") for seed in self.sweep_seeds]

    def dense(self, shards: str, lr: float, seed: int) -> Cell:
        """What points are compared with."""
        return dense(self.workload, self.optimizer, shards, lr, self.steps, seed)

    def at(self, point: Point, shards: str, lr: float, seed: int) -> Cell:
        """A point's run."""
        where = (point.exchange, point.values, point.ratio)
        common = (self.workload, self.optimizer, shards, *where, lr, self.steps, seed)
        return Cell(*common, momentum=point.momentum, gather_ratio=point.gather_ratio)


@dataclass(frozen=True)
class Stage:
    """Points of a series, trained seed by seed."""

    series: Series
    shards: str
    points: tuple[Point, ...]
    seeds: tuple[int, ...]

    def cells(self, lr: float) -> list[Cell]:
        """All runs, dense's among them."""
        return [
            cell
            for seed in self.seeds
            for cell in (
                self.series.dense(self.shards, lr, seed),
                *(self.series.at(point, self.shards, lr, seed) for point in self.points),
            )
        ]


DIGITS_SEEDS, BYTELM_SEEDS = (0, 1, 2, 3, 4), (0, 1)
DIGITS = Series("digits", "sgd", 1000, (0.05, 0.1, 0.2), (100, 101), DIGITS_SEEDS)
DIGITS_ADAMW = Series("digits", "adamw", 1000, (0.001, 0.002, 0.005), (100, 101), DIGITS_SEEDS)
BYTELM = Series("bytelm", "sgd", 4000, (0.05, 0.1, 0.2), (100,), BYTELM_SEEDS)
BYTELM_ADAMW = Series("bytelm", "adamw", 4000, (0.001, 0.002, 0.005), (100,), BYTELM_SEEDS)
SERIES = (DIGITS, BYTELM, DIGITS_ADAMW, BYTELM_ADAMW)


def stages() -> Iterator[Stage]:
    """The study, in the order in which it is done.

    Of the byte model without momentum correction most points have one seed: they lose so much that
    a second would tell nothing more.
    """
    digits, bytelm = equal_bytes("digits", (165.0,)), equal_bytes("bytelm", GOALS)
    coarse = tuple(point for point in bytelm if point.values != "float32")
    yield Stage(DIGITS, "equal", digits, DIGITS_SEEDS)
    yield Stage(BYTELM, "equal", equal_bytes("bytelm", (50.0,)), (0,))
    yield Stage(BYTELM, "equal", corrected(equal_bytes("bytelm", (50.0,))), (0,))
    yield Stage(DIGITS, "equal", (RECIPE, PLAIN), DIGITS_SEEDS)
    yield Stage(DIGITS, "skewed", (RECIPE, PLAIN), DIGITS_SEEDS)
    yield Stage(BYTELM, "skewed", (RECIPE, PLAIN), BYTELM_SEEDS)
    yield Stage(BYTELM_ADAMW, "skewed", (RECIPE, PLAIN), BYTELM_SEEDS)
    yield Stage(DIGITS, "equal", corrected(digits), DIGITS_SEEDS)
    yield Stage(BYTELM, "equal", corrected(bytelm), BYTELM_SEEDS)
    yield Stage(DIGITS, "equal", over_nodes("digits", (165.0,)), DIGITS_SEEDS)
    yield Stage(BYTELM, "equal", over_nodes("bytelm", GOALS, ("int4",)), (0,))
    yield Stage(BYTELM, "equal", tuple(uneven("bytelm", 165.0, s) for s in SHARES), (0,))
    yield Stage(BYTELM, "equal", bytelm, (0,))
    yield Stage(DIGITS, "skewed", digits, DIGITS_SEEDS)
    yield Stage(DIGITS_ADAMW, "equal", digits, DIGITS_SEEDS)
    yield Stage(DIGITS_ADAMW, "skewed", digits, DIGITS_SEEDS)
    yield Stage(BYTELM, "equal", (DEFAULT, PLAIN, SHARDED), BYTELM_SEEDS)
    yield Stage(BYTELM_ADAMW, "equal", corrected(bytelm), BYTELM_SEEDS)
    yield Stage(BYTELM_ADAMW, "equal", (DEFAULT, PLAIN), BYTELM_SEEDS)
    yield Stage(DIGITS, "equal", grid_of(FORMATS, RATIOS), DIGITS_SEEDS)
    yield Stage(BYTELM, "skewed", corrected(coarse), BYTELM_SEEDS)
    yield Stage(BYTELM_ADAMW, "skewed", corrected(coarse), BYTELM_SEEDS)
    yield Stage(BYTELM, "equal", corrected(equal_bytes("bytelm", (100.0, 300.0))), BYTELM_SEEDS)
    yield Stage(DIGITS, "skewed", grid_of(FORMATS, ENDS), DIGITS_SEEDS)
    yield Stage(DIGITS_ADAMW, "equal", grid_of(FORMATS, ENDS), DIGITS_SEEDS)
    yield Stage(DIGITS, "equal", grid_of(HALVES, RATIOS), DIGITS_SEEDS[:2])
    yield Stage(DIGITS, "equal", grid_of(HALVES, (DEFAULT.ratio,)), DIGITS_SEEDS)
    yield Stage(BYTELM_ADAMW, "equal", equal_bytes("bytelm", (50.0,)), (0,))
    recommended = (RECIPE, *corrected([point for point in digits if point.values == "int4"]))
    yield Stage(DIGITS_ADAMW, "skewed", recommended, DIGITS_SEEDS)
    yield Stage(DIGITS_ADAMW, "equal", recommended, DIGITS_SEEDS)
    yield from one_ratio_stages()


def one_ratio_stages() -> Iterator[Stage]:
    """Every exchange at the same ratio, which is what `exchange="auto"` chooses among."""
    plain = tuple(Point(exchange, "int4", DEFAULT.ratio) for exchange in (*EXCHANGES, NODES))
    both = (*plain, *corrected(plain[: len(EXCHANGES)]))
    yield Stage(DIGITS, "equal", both, DIGITS_SEEDS)
    yield Stage(BYTELM, "equal", both, (0,))
    yield Stage(BYTELM_ADAMW, "equal", corrected(plain[: len(EXCHANGES)]), (0,))


def recipe_stages() -> Iterator[tuple[Stage, Series]]:
    """The recipe, and what it is without momentum correction, in shorter and longer runs.

    Beside each the series whose sweep finds the learning rate.
    """
    for seeds in ((0,), BYTELM_SEEDS):
        for steps, series in product(RECIPE_STEPS, (BYTELM, BYTELM_ADAMW)):
            yield Stage(replace(series, steps=steps), "equal", (RECIPE, PLAIN), seeds), series


def lengths(series: Series) -> list[int]:
    """Of the recipe's runs, in steps."""
    return sorted({series.steps, *RECIPE_STEPS})


def ablations() -> Iterator[tuple[str, Cell]]:
    """The recipe with a part left out or added, and its name; seed 0, equal shards."""
    for series in (BYTELM, BYTELM_ADAMW):
        lr = chosen(series)
        if lr is None:
            continue
        recipe = series.at(RECIPE, "equal", lr, 0)
        sharded = series.at(replace(RECIPE, exchange="sharded", ratio=0.01), "equal", lr, 0)
        early = series.steps // 5
        yield "`TopKEF.compact()`", recipe
        yield "without momentum correction", replace(recipe, momentum=0.0)
        yield "without masking", replace(recipe, without=MASKING)
        yield "without error feedback", replace(recipe, without=FEEDBACK)
        yield f"with warm-up over {early:,} steps", replace(recipe, warmup=early)
        eight = largest_ratio(series.workload, "allgather", "int8", GOALS[0])
        if eight is not None:
            wider = series.at(replace(eight, momentum=MOMENTUM), "equal", lr, 0)
            yield f"values of 8 bits, ratio {eight.ratio:g}: as many bytes", wider
        yield "sharded, ratio 0.01", sharded
        yield "the same without the owners' residual", replace(sharded, without=OWNERS)


def way(point: Point) -> str:
    """A point's exchange, and whether momentum is corrected, in words."""
    return f"{point.exchange}, corrected" if point.momentum else point.exchange


def grid_of(formats: Sequence[str], ratios: Sequence[float]) -> tuple[Point, ...]:
    """Every exchange with these formats and ratios."""
    return tuple(Point(*each) for each in product(EXCHANGES, formats, ratios))


def equal_bytes(workload: str, goals: Sequence[float]) -> tuple[Point, ...]:
    """The defaults; then for each reduction, exchange and format the largest ratio that has it."""
    wanted = product(goals, EXCHANGES, FORMATS)
    found = (largest_ratio(workload, exchange, values, goal) for goal, exchange, values in wanted)
    return (DEFAULT, *(point for point in found if point is not None))


def over_nodes(
    workload: str, goals: Sequence[float], formats: Sequence[str] = FORMATS
) -> tuple[Point, ...]:
    """`hierarchical` at the largest ratios at which so many times fewer bytes leave a node."""
    found = (largest_ratio(workload, NODES, values, g) for g, values in product(goals, formats))
    return tuple(point for point in found if point is not None)


def corrected(points: Sequence[Point]) -> tuple[Point, ...]:
    """The same with momentum correction."""
    return tuple(replace(point, momentum=MOMENTUM) for point in points)


def largest_ratio(workload: str, exchange: str, values: str, goal: float) -> Point | None:
    """The point of largest ratio, in two digits, that sends `goal` times fewer bytes than dense."""
    points = (Point(exchange, values, ratio) for ratio in reversed(FINE_RATIOS))
    return next((p for p in points if reduction(workload, p) >= goal), None)


@cache
def uneven(workload: str, goal: float, share: float) -> Point:
    """Of `sharded`, int4, corrected: `gather_ratio` is `share` times the ratio."""
    points = (
        Point("sharded", "int4", ratio, MOMENTUM, round(share * ratio, 6))
        for ratio in reversed(FINE_RATIOS)
        if share * ratio <= 1
    )
    return next(point for point in points if reduction(workload, point) >= goal)


@cache
def reduction(workload: str, point: Point, ranks: int = RANKS) -> float:
    """How many times fewer bytes than in a ring allreduce; see `counted_bytes`."""
    config = TopK(
        point.ratio,
        values=point.values,
        exchange=point.exchange,
        momentum=point.momentum,
        gather_ratio=point.gather_ratio,
    )
    exchange = exchange_of(point.exchange, Loopback(ranks), 0)
    traffic = exchange.traffic(plan_of(_model(workload), config))
    return traffic.dense_bytes / counted_bytes(traffic)


@cache
def _model(workload: str) -> object:
    return WORKLOADS[workload].model()


def sweep_scores(series: Series) -> dict[float, list[float]]:
    """Final validation scores of dense, one a seed, by learning rate; see `results.grown`."""
    known = records.finished()

    def scores_of(lr: float) -> list[float]:
        cells = series.sweep(lr)
        if any(cell not in known for cell in cells):
            return []
        return [_score(series, records.score(known[cell])) for cell in cells]

    return results.grown(series.grid, scores_of, partial(results.best, series))


def _score(series: Series, score: float | None) -> float:
    """A run that diverged has the worst score there is."""
    worst = float("-inf") if series.higher_is_better else float("inf")
    return worst if score is None else score


def chosen(series: Series) -> float | None:
    """Dense's learning rate; None while its sweep is not finished."""
    scores = sweep_scores(series)
    return results.best(series, scores) if all(scores.values()) else None


def sweep(series: Series) -> float:
    """Finishes a sweep, however far its grid has to grow; returns the learning rate chosen."""
    while missing := [lr for lr, scores in sweep_scores(series).items() if not scores]:
        cells = [cell for lr in missing for cell in series.sweep(lr)]
        records.finish(cells, f"sweep {series.workload} {series.optimizer}")
    return results.best(series, sweep_scores(series))
