"""Count Horovod's cycles. Its ranks exchange messages once a cycle, even when they are idle."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Self

import horovod.torch as hvd

WRITER_SECONDS = 60.0  # limit for Horovod's timeline to reach the disk
MARGIN_SECONDS = 0.3  # all ranks know of the timeline's start or end by then
START, ORIGIN = "CYCLE_START", "start_time_since_epoch_in_micros"


class Cycles:
    """Counts the cycles of a job while its ranks run in step; used on every rank.

    Counting adds messages to each cycle, so bytes on the card meanwhile are higher than otherwise.
    The job needs `HOROVOD_TIMELINE=DYNAMIC`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._starts: list[float] = []  # in seconds since the epoch, by rank 0's clock

    def __enter__(self) -> Self:
        hvd.barrier()
        hvd.start_timeline(str(self._path), mark_cycles=True)
        time.sleep(MARGIN_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        time.sleep(MARGIN_SECONDS)
        hvd.stop_timeline()
        if hvd.rank() == 0:
            self._starts = starts_in(_written(self._path))
            self._path.unlink()

    def between(self, began: float, ended: float) -> int:
        """Number of cycles that began between two readings of rank 0's `time.time`; 0 elsewhere."""
        return sum(began <= start < ended for start in self._starts)


def starts_in(timeline: str) -> list[float]:
    """Start of each cycle of a timeline, in seconds since the epoch."""
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
