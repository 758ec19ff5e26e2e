"""A study over models, optimizers, rates, shards and clipping: tables and a picture of its cells.

A cell is a variant of a case's grid. The first learning rate of a grid is dense's best.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from horovod_topk.cli.compare.result import Found
from study import pictures
from study.markdown import rounded, table
from study.results import DENSE, RESULTS, Row, Study, end, shown

RATES = ("best", "half", "limit")  # in the order of a grid's learning rates
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


def cells(study: Study, *names: str) -> str:
    """Every cell: dense's final score, and what each compressor costs, seed by seed."""
    rows = []
    for place in places(study):
        options, metric = place.options, place.found.metric.name
        dense = next(iter(place.rows.values())).dense
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
