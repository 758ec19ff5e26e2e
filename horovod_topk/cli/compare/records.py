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
    """The records of a comparison: a folder with a file for each, or one file of JSON lines.

    Args:
        path: of the folder, made when it is first needed; or of the file, which ends in .jsonl.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.is_file = path, path.suffix == ".jsonl"
        self.folder = path.parent if self.is_file else path
        self._lines: dict[str, dict[str, Any]] = {}  # by digest; the last one counts
        if self.is_file and path.exists():
            for line in path.read_text().splitlines():
                found = json.loads(line)
                self._lines[_cell(found["cell"]).digest] = found

    def find(self, cell: Cell) -> Record | None:
        """A finished run, if this one is."""
        if self.is_file:
            found = self._lines.get(cell.digest)
            return None if found is None else _record(found, cell)
        path = self.folder / f"{cell.digest}.json"
        return _record(json.loads(path.read_text()), cell) if path.exists() else None

    def keep(self, record: Record) -> None:
        """Write a record at once or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.is_file:
            self._lines[record.cell.digest] = asdict(record)
            with self.path.open("a") as file:
                file.write(json.dumps(asdict(record)) + "\n")
            return
        path = self.folder / f"{record.cell.digest}.json"
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps(asdict(record), indent=1) + "\n")
        partial.replace(path)


def _cell(found: Mapping[str, Any]) -> Cell:
    pairs = {key: tuple(tuple(each) for each in found[key]) for key in ("grid", "where")}
    return Cell(found["compressor"], found["seed"], tuple(found["arguments"]), **pairs)


def _record(found: Mapping[str, Any], cell: Cell) -> Record:
    points = tuple(Point(**point) for point in found["points"])
    return Record(**{**found, "cell": cell, "points": points})
