"""Runs of a comparison, their records, and the files that keep them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from horovod_topk.cli.reading import misfit

DONE, FAILED, LATE, DIVERGED = "done", "failed", "cut off", "diverged"
STOPPED = "stopped"  # by `tune`, before its end
Amount = Annotated[float | None, lambda value: value is None or value >= 0]


@dataclass(frozen=True)
class Cell:
    """The settings that identify one run."""

    compressor: str  # as `core.run.substitute` writes it
    seed: int
    arguments: tuple[str, ...]  # arguments of the script
    grid: tuple[tuple[str, Any], ...]  # values from the settings' grid, also in `arguments`
    where: tuple[tuple[str, Any], ...]  # script, ranks, hosts, network: equal for all runs

    @cached_property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that identify the run."""
        text = json.dumps([self.compressor, self.seed, self.arguments, self.where])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Point:
    """One report of a script after a step."""

    step: int
    seconds: float  # since the script built its optimizer
    metrics: Mapping[str, float | None]  # None: not finite


@dataclass(frozen=True)
class Record:
    """A finished run: its settings, its outcome, and its reports."""

    cell: Cell
    status: Annotated[str, (DONE, FAILED, LATE, STOPPED).__contains__]
    problem: str = ""  # why it failed, and the end of its output
    points: tuple[Point, ...] = ()
    sent_bytes: Amount = None  # per step, by rank 0; None: Horovod's own, not counted
    dense_bytes: Amount = None  # per step, by a ring allreduce of the same gradients
    waited: Amount = None  # seconds per step in optimizer.synchronize(); None: unknown
    peak_memory: Amount = None  # bytes, on rank 0
    seeded: bool = True  # whether the script has used its seed
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
        """The status; DIVERGED if a value of the metric is not finite."""
        if self.status == DONE and any(p.metrics.get(metric, 0.0) is None for p in self.points):
            return DIVERGED
        return self.status

    @property
    def seconds_per_step(self) -> float | None:
        """Seconds per step between the first and the last report, with evaluations."""
        if len(self.points) < 2:
            return None
        first, last = self.points[0], self.points[-1]
        steps = last.step - first.step
        return (last.seconds - first.seconds) / steps if steps > 0 else None


class Store:
    """The records of a comparison: a folder with a file for each, or one file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self.path, self.is_file = path, path.suffix == ".jsonl"
        self.folder = path.parent if self.is_file else path
        self._lines: dict[str, dict[str, Any]] = {}  # by digest; the last line of a run counts
        if self.is_file and path.exists():
            for number, line in enumerate(_text(path).splitlines(), 1):
                found = _read(line, f"{path}, line {number}")
                self._lines[_cell(found["cell"]).digest] = found

    def find(self, cell: Cell) -> Record | None:
        """The record of a run; None if it is not finished."""
        if self.is_file:
            found = self._lines.get(cell.digest)
            return None if found is None else _record(found, cell)
        path = self.folder / f"{cell.digest}.json"
        return _record(_read(_text(path), str(path)), cell) if path.exists() else None

    def keep(self, record: Record) -> None:
        """Write a record, completely or not at all."""
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


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read ({error}): give --out another path") from error


def _read(text: str, where: str) -> dict[str, Any]:
    """Parse a record from JSON, and check the types of its values."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is no run of compare ({error}): {CURE}") from error
    if problem := misfit(Record, found):
        raise ValueError(f"{where} is no run of compare ({problem}): {CURE}")
    return dict(found)


CURE = "remove it, so that the run is made again, or give --out another path"


def _cell(found: Mapping[str, Any]) -> Cell:
    pairs = {key: tuple(tuple(each) for each in found[key]) for key in ("grid", "where")}
    return Cell(found["compressor"], found["seed"], tuple(found["arguments"]), **pairs)


def _record(found: Mapping[str, Any], cell: Cell) -> Record:
    points = tuple(Point(**point) for point in found["points"])
    return Record(**{**found, "cell": cell, "points": points})
