"""What a comparison runs, what it keeps of each run, and where: one JSON file a run."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

DONE, FAILED, LATE, DIVERGED = "done", "failed", "cut off", "diverged"


@dataclass(frozen=True)
class Cell:
    """One run, by all that tells it from the others."""

    compressor: str  # as `horovod_topk.core.substitute` writes it
    seed: int
    arguments: tuple[str, ...]  # of the script
    grid: tuple[tuple[str, Any], ...]  # values of the settings' grid; already in `arguments`
    where: tuple[tuple[str, Any], ...]  # script, ranks, hosts, network: equal for all runs

    @cached_property
    def digest(self) -> str:
        """Sixteen hexadecimal digits, other ones for each other run."""
        text = json.dumps([self.compressor, self.seed, self.arguments, self.where])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Point:
    """What a script reported after a step."""

    step: int
    seconds: float  # since the script built its optimizer
    metrics: Mapping[str, float | None]  # None: not finite


@dataclass(frozen=True)
class Record:
    """A finished run: what it was, how it ended, and what it reported."""

    cell: Cell
    status: str  # DONE, FAILED or LATE
    problem: str = ""  # why it failed, and the end of its output
    points: tuple[Point, ...] = ()
    sent_bytes: float | None = None  # a step, by rank 0; None: Horovod's own exchange, not counted
    dense_bytes: float | None = None  # a step, of a ring allreduce of the same gradients
    waited: float | None = None  # seconds a step in optimizer.synchronize(); None: not measured
    peak_memory: float | None = None  # bytes, of rank 0
    seeded: bool = True  # whether the script asked for its seed
    machine: Mapping[str, object] = field(default_factory=dict)

    def curve(self, metric: str) -> list[tuple[int, float, float]]:
        """Steps, seconds and values of a metric, up to the first value that is not finite."""
        found: list[tuple[int, float, float]] = []
        for point in self.points:
            value = point.metrics.get(metric, math.nan)
            if value is None:
                break
            if not math.isnan(value):
                found.append((point.step, point.seconds, value))
        return found

    def outcome(self, metric: str) -> str:
        """DONE, FAILED or LATE; DIVERGED if a value of the metric is not finite."""
        if self.status == DONE and any(p.metrics.get(metric, 0.0) is None for p in self.points):
            return DIVERGED
        return self.status

    @property
    def seconds_per_step(self) -> float | None:
        """Of the training between the first and the last report; evaluations are in it."""
        if len(self.points) < 2:
            return None
        first, last = self.points[0], self.points[-1]
        steps = last.step - first.step
        return (last.seconds - first.seconds) / steps if steps > 0 else None


class Store:
    """A folder with the records of a comparison.

    Args:
        folder: made when the first record is kept.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, cell: Cell) -> Path:
        """Of a run's record."""
        return self.folder / f"{cell.digest}.json"

    def find(self, cell: Cell) -> Record | None:
        """A finished run, if this one is."""
        path = self.path(cell)
        return read(json.loads(path.read_text()), cell) if path.exists() else None

    def keep(self, record: Record) -> None:
        """Write a record at once or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.path(record.cell)
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps(asdict(record), indent=1) + "\n")
        partial.replace(path)


def read(found: Mapping[str, Any], cell: Cell) -> Record:
    """A record as `Store.keep` wrote it, or as a line of results has it."""
    points = tuple(Point(**point) for point in found["points"])
    return Record(**{**found, "cell": cell, "points": points})
