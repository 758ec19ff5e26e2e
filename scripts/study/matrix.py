"""A study over models, optimizers, rates, shards and clipping: tables and a picture of its cells.

A cell is a variant of a case's grid. The first learning rate of a grid is dense's best.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from horovod_topk.cli.compare.records import Store
from horovod_topk.cli.compare.result import Found
from horovod_topk.cli.compare.session import results
from horovod_topk.core.run.substitute import parse
from pages import RESULTS
from pages.markdown import rounded, spread, table
from study.results import DENSE, Row, Study, end, shown

RATES = ("best", "half", "limit")  # in the order of a grid's learning rates
WORDS = {"best": "best rate", "half": "half of it", "limit": "largest rate"}
OPTIMIZERS = {
    "momentum": "SGD with momentum",
    "nesterov": "Nesterov",
    "adamw": "AdamW",
    "adam": "Adam",
}
METRICS = {"%": "bits a byte", " points": "accuracy"}
UNITS = {"bits_per_byte": "%", "mse": "%", "accuracy": " points"}


@dataclass(frozen=True)
class Place:
    """One cell, with what was run of it."""

    found: Found
    rows: dict[str, Row]

    @property
    def options(self) -> dict[str, object]:
        """Those of the training loop."""
        return {**self.found.settings.options, **dict(self.found.variant)}

    @property
    def rate(self) -> str:
        """Which learning rate it is, beside dense's best."""
        return RATES[self.found.settings.grid["lr"].index(self.options["lr"])]


def places(study: Study) -> Iterator[Place]:
    """The cells of which a dense run and another are there."""
    for variants in study.cases.values():
        for found in variants:
            if not found.runs.get(DENSE):
                continue
            rows = {name: row for name, row in study.rows_of(found).items() if row.costs}
            if rows:
                yield Place(found, rows)


def grouped(study: Study, key: Callable[[Place], Any]) -> dict[Any, list[Place]]:
    """The cells that have been run, by a key, in the order of the study."""
    groups: dict[Any, list[Place]] = {}
    for place in places(study):
        groups.setdefault(key(place), []).append(place)
    return groups


def _loop(place: Place) -> tuple[str, int, str]:
    return str(place.options["optimizer"]), int(str(place.options["steps"])), place.rate


def _rows(found: Iterable[Place], name: str) -> list[Row]:
    """A compressor's rows of these cells, where it was run; dense's are against another seed."""
    if name == DENSE:
        rows = (_with_other_seeds(next(iter(place.rows.values()))) for place in found)
        return [row for row in rows if len(row.dense) > 1 and None not in row.scores()]
    return [place.rows[name] for place in found if name in place.rows]


def _with_other_seeds(row: Row) -> Row:
    """Put dense's runs in the place of a compressor's, each beside dense with another seed."""
    seeds = [*row.dense]
    return replace(
        row, name=DENSE, runs={seed: row.dense[seeds[i - 1]] for i, seed in enumerate(seeds)}
    )


def _mean_and_worst(rows: list[Row], unit: str) -> str:
    """Mean cost, mean cost of the worst cell, and number of runs."""
    mean = _mean(rows, unit)
    if not rows or any(math.isinf(row.cost) for row in rows):
        return mean
    worst = max(statistics.mean(losses(row.costs)) for row in rows)
    return f"{mean}, worst {worst:.2f} ({sum(len(row.costs) for row in rows)})"


def _mean(rows: list[Row], unit: str) -> str:
    """The mean of the differences to dense, in which gains count as zero."""
    costs = [cost for row in rows for cost in row.costs]
    if not costs:
        return "not run"
    if diverged := sum(map(math.isinf, costs)):
        return f"{diverged} of {len(costs)} runs diverged"
    return f"{statistics.mean(losses(costs)):.2f}{unit}"


def losses(costs: Iterable[float]) -> list[float]:
    """Replace gains by zero."""
    return [max(0.0, cost) for cost in costs]


def brief(study: Study, name: str) -> str:
    """A compressor's mean costs: a row for each optimizer, a column for each length and rate."""
    groups = grouped(study, lambda p: (*_loop(p), UNITS[p.found.metric.name]))
    units = sorted({unit for *_, unit in groups}, reverse=True)
    columns = dict.fromkeys((steps, rate) for _, steps, rate, _ in groups)
    rows = []
    for optimizer in dict.fromkeys(key[0] for key in groups):
        cells = []
        for steps, rate in columns:
            found = [(_rows(groups.get((optimizer, steps, rate, u), []), name), u) for u in units]
            cells.append(", ".join(_mean(each, unit) for each, unit in found if each) or "not run")
        rows.append([OPTIMIZERS[optimizer], *cells])
    return table(["", *(f"{steps:,} steps, {WORDS[rate]}" for steps, rate in columns)], rows)


def signed(study: Study, name: str, metric: str) -> str:
    """Return a compressor's mean cost by optimizer, gains included, and its standard error."""
    groups = grouped(study, lambda p: (p.found.metric.name, str(p.options["optimizer"])))
    said = []
    for (of, optimizer), found in groups.items():
        costs = [cost for row in _rows(found, name) for cost in row.costs]
        if of == metric:
            figure = spread(costs, "+", UNITS[metric])
            said.append(f"{figure} with {OPTIMIZERS[optimizer]} ({len(costs)} runs)")
    return ", ".join(said)


def changed(study: Study, name: str, former: str) -> str:
    """Say how much more a compressor costs than its runs with a former version, by metric.

    former: the file of docs/results with these runs, without its ending.
    """
    costs = dict[str, list[float]]()
    store = Store(RESULTS / f"{former}.jsonl")
    for settings, cells in zip(study.settings, study.cases.values(), strict=True):
        runs = {each.variant: each.runs.get(name, {}) for each in results(settings, store)}
        for now in cells:
            asked, metric = parse(settings.compressors[name]), now.metric.name
            before = dict(runs.get(now.variant, {}))
            row = Row(name, asked, metric, dict(now.runs.get(name, {})), before)
            costs.setdefault(UNITS[metric], []).extend(row.costs)
    figures = [f"{spread(each, '+', unit)} ({len(each)} runs)" for unit, each in costs.items()]
    return " and ".join(figures)


def worst(study: Study, name: str, count: str) -> str:
    """List the cells in which a compressor costs most, `count` for each metric, worst first."""
    said = []
    groups = grouped(study, lambda p: UNITS[p.found.metric.name])
    for unit, found in sorted(groups.items(), reverse=True):
        run = [place for place in found if name in place.rows]
        run.sort(key=lambda place: place.rows[name].cost, reverse=True)
        said += [f"{_costs(p.rows[name], unit)} ({_described(p)})" for p in run[: int(count)]]
    return "; ".join(said)


def beyond_seeds(study: Study, name: str) -> str:
    """Count the cells in which a compressor costs more than dense's own seeds differ, by model.

    It also has to cost more than 2%, or 1 point. Cells at the largest rate do not count.
    """
    found = [p for p in places(study) if p.rate != "limit" and name in p.rows]
    beyond = Counter[str]()
    for place in found:
        metric, cost = place.found.metric.name, place.rows[name].cost
        ends = [x for x in (end(metric, run) for run in _dense(place).values()) if x is not None]
        differs = 100 * (max(ends) - min(ends)) / (1 if metric == "accuracy" else min(ends))
        if cost > max({"%": 2.0, " points": 1.0}[UNITS[metric]], differs):
            beyond[str(place.options["model"])] += 1
    models = ", ".join(f"{count} of the model {model}" for model, count in beyond.items())
    return f"{beyond.total()} of {len(found)} cells ({models})"


def parts(study: Study) -> str:
    """Tabulate the mean costs of all compressors, by optimizer and metric."""
    groups = grouped(study, lambda p: (str(p.options["optimizer"]), UNITS[p.found.metric.name]))
    ways = sorted(groups, key=lambda way: (list(OPTIMIZERS).index(way[0]), way[1] != "%"))
    names = dict.fromkeys(name for each in groups.values() for p in each for name in p.rows)
    rows = [
        [name, *(_mean_and_worst(_rows(groups[w], name), w[1]) for w in ways)] for name in names
    ]
    head = [f"{OPTIMIZERS[optimizer]}, {METRICS[unit]}" for optimizer, unit in ways]
    return table(["", *head], rows)


def _described(place: Place) -> str:
    options, metric = place.options, place.found.metric.name
    dense = shown(metric, [end(metric, run) for run in _dense(place).values()])
    clipped = ", clipped" if options["clip_norm"] else ""
    return (
        f"{options['model']}, {OPTIMIZERS[str(options['optimizer'])]}, {options['steps']:,} steps, "
        f"{WORDS[place.rate]}, {options['shards']} shards{clipped}; dense {dense}"
    )


def _dense(place: Place) -> Mapping[int, Any]:
    return next(iter(place.rows.values())).dense


def by_loop(study: Study, name: str) -> str:
    """Tabulate what a compressor costs, seed by seed: a row for each model and optimizer."""
    groups = grouped(study, lambda p: (str(p.options["model"]), str(p.options["optimizer"])))
    ways = dict.fromkeys(
        (p.rate, str(p.options["shards"])) for found in groups.values() for p in found
    )
    rows = []
    for (model, optimizer), found in sorted(groups.items()):
        at = {(p.rate, str(p.options["shards"])): p for p in found}
        costs = [
            _costs(at[way].rows.get(name), UNITS[at[way].found.metric.name])
            if way in at
            else "not run"
            for way in ways
        ]
        rows.append([model, OPTIMIZERS[optimizer], *costs])
    head = [f"{WORDS[rate]}, {shards} shards" for rate, shards in ways]
    return table(["model", "optimizer", *head], rows)


def _costs(row: Row | None, unit: str) -> str:
    if row is None:
        return "not run"
    return ", ".join(
        "diverged" if math.isinf(cost) else f"{rounded(cost):+.2f}{unit}" for cost in row.costs
    )
