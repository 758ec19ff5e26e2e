"""A study over models, optimizers, rates, shards and clipping: tables and a picture of its cells.

A cell is a variant of a case's grid. The first learning rate of a grid is dense's best.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from horovod_topk.cli.compare.result import Found
from study import pictures
from study.markdown import rounded, table
from study.results import DENSE, RESULTS, Row, Study, end, shown

RATES = ("best", "half", "limit")  # in the order of a grid's learning rates
WORDS = {"best": "best rate", "half": "half of it", "limit": "largest rate"}
OPTIMIZERS = {"momentum": "SGD with momentum", "nesterov": "Nesterov", "adamw": "AdamW"}
UNITS = {"bits_per_byte": "%", "accuracy": " points"}


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


def progress(study: Study) -> str:
    """How many cells have been run."""
    cells = sum(len(settings.variants()) for settings in study.settings)
    return f"{len(list(places(study)))} of {cells} cells"


def means(study: Study, *names: str) -> str:
    """Mean cost and worst cell by optimizer, steps, rate and metric; gains count as zero."""
    groups: dict[tuple[str, ...], list[Place]] = {}
    for place in places(study):
        options, metric = place.options, place.found.metric.name
        key = str(options["optimizer"]), f"{options['steps']:,}", place.rate, metric
        groups.setdefault(key, []).append(place)
    rows = []
    for (optimizer, steps, rate, metric), found in sorted(groups.items()):
        figures = [_mean([p.rows[n] for p in found if n in p.rows], UNITS[metric]) for n in names]
        rows.append([optimizer, steps, rate, metric.replace("_", " "), str(len(found)), *figures])
    return table(["optimizer", "steps", "rate", "metric", "cells", *names], rows)


def _mean(rows: list[Row], unit: str) -> str:
    """Of paired differences to dense, and the worst cell's mean."""
    if not rows:
        return "not run"
    costs = [cost for row in rows for cost in row.costs]
    if diverged := sum(map(math.isinf, costs)):
        return f"{diverged} of {len(costs)} runs diverged"
    mean = statistics.mean(max(0.0, cost) for cost in costs)
    return f"{mean:.2f}{unit}, worst {rounded(max(row.cost for row in rows)):.2f}"


def brief(study: Study, name: str) -> str:
    """A compressor's mean costs, a row an optimizer and a column a length and rate."""
    groups: dict[str, dict[str, dict[str, list[Row]]]] = {}
    for place in places(study):
        if name in place.rows:
            options, unit = place.options, UNITS[place.found.metric.name]
            column = f"{options['steps']:,} steps, {WORDS[place.rate]}"
            found = groups.setdefault(OPTIMIZERS[str(options["optimizer"])], {})
            found.setdefault(column, {}).setdefault(unit, []).append(place.rows[name])
    columns = sorted({c for found in groups.values() for c in found}, key=lambda c: (len(c), c))
    rows = [
        [optimizer, *(_both(found.get(column, {})) for column in columns)]
        for optimizer, found in groups.items()
    ]
    return table(["", *columns], rows)


def _both(of_unit: dict[str, list[Row]]) -> str:
    means = [
        _mean(rows, unit).partition(",")[0] for unit, rows in sorted(of_unit.items(), reverse=True)
    ]
    return ", ".join(means) or "not run"


def worst(study: Study, name: str, count: str) -> str:
    """The cells of each metric that cost most in the mean of their seeds, worst first."""
    found: dict[str, list[Place]] = {}
    for place in places(study):
        if name in place.rows:
            found.setdefault(UNITS[place.found.metric.name], []).append(place)
    said = []
    for unit, of_unit in sorted(found.items(), reverse=True):
        of_unit.sort(key=lambda place: place.rows[name].cost, reverse=True)
        said += [f"{_costs(p.rows[name], unit)} ({_described(p)})" for p in of_unit[: int(count)]]
    return "; ".join(said)


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


def cells(study: Study, *names: str) -> str:
    """Every cell: dense's final score, and what each compressor costs, seed by seed."""
    rows = []
    for place in places(study):
        options, metric = place.options, place.found.metric.name
        dense = _dense(place)
        clip = f"{options['clip_norm']:g}" if options["clip_norm"] else "no"
        rows.append(
            [
                *(str(options[key]) for key in ("model", "optimizer")),
                f"{options['steps']:,}",
                f"{options['lr']:g}, {place.rate}",
                str(options["shards"]),
                clip,
                shown(metric, [end(metric, run) for run in dense.values()]),
                *(_costs(place.rows.get(name), UNITS[metric]) for name in names),
            ]
        )
    header = ["model", "optimizer", "steps", "rate", "shards", "clipped to", "dense"]
    return table([*header, *names], rows)


def _costs(row: Row | None, unit: str) -> str:
    if row is None:
        return "not run"
    return ", ".join(
        "diverged" if math.isinf(cost) else f"{rounded(cost):+.2f}{unit}" for cost in row.costs
    )


def dots(study: Study, name: str, *names: str) -> str:
    """Link to a picture, which is drawn, of cost against bytes: a dot a cell."""
    found = {n: [p.rows[n] for p in places(study) if n in p.rows] for n in names}
    pictures.dots(RESULTS / name, found)
    return f"![What each cell costs against the bytes that it sends](results/{name})"
