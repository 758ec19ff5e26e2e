"""Horovod's cycles, counted: in each its ranks talk once, whether or not they exchange anything."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path

import horovod.torch as hvd

WRITER_SECONDS = 60.0  # that Horovod's timeline may take to reach the disk
START, ORIGIN = "CYCLE_START", "start_time_since_epoch_in_micros"


@dataclass
class Cycles:
    """Rank 0's timeline of a job, which needs `HOROVOD_TIMELINE=DYNAMIC`; all ranks are in step."""

    path: Path
    starts: list[float] = field(default_factory=list)  # in seconds since the epoch

    def watch(self) -> None:
        """From now on. On every rank."""
        hvd.start_timeline(str(self.path), mark_cycles=True)

    def end(self) -> None:
        """No more. On every rank; rank 0 reads what was written.

        Raises:
            RuntimeError: Horovod has written no timeline.
        """
        hvd.stop_timeline()
        if hvd.rank() == 0:
            self.starts = starts_in(_written(self.path))

    def between(self, began: float, ended: float) -> int:
        """How many began between two readings of `time.time`."""
        return sum(began <= start < ended for start in self.starts)


def starts_in(timeline: str) -> list[float]:
    """When the cycles of a timeline began, in seconds since the epoch."""
    events = json.loads(timeline)
    (origin,) = (e["args"][ORIGIN] for e in events if ORIGIN in e.get("args", {}))
    return [(origin + e["ts"]) / 1e6 for e in events if e.get("name") == START]


def _written(path: Path) -> str:
    """A timeline's text, once its writer has closed the list."""
    deadline = time.monotonic() + WRITER_SECONDS
    while time.monotonic() < deadline:
        text = path.read_text().rstrip() if path.exists() else ""
        if text.endswith("]"):
            return text
        time.sleep(0.2)
    raise RuntimeError(f"{path}: Horovod has written no timeline; set HOROVOD_TIMELINE=DYNAMIC")
