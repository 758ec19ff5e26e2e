"""What ranks noted down, read as an account of an elastic job: what each failure cost."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Note = dict[str, Any]


@dataclass(frozen=True)
class Return:
    """The job goes on after one or more ranks were killed."""

    reached: int  # the last step that any rank had ended
    committed: int  # the last step that any rank had begun to commit
    resumed: int  # the step it goes on from
    same_weights: bool  # as when that step was committed
    owed_apart: float | None  # change of the residuals' mean over its largest; None: no commit
    lost: int  # ranks whose residuals could not be had

    @property
    def redone(self) -> int:
        """Steps that are taken a second time."""
        return self.reached - self.resumed


def notes_in(folder: Path) -> list[Note]:
    """All ranks', in the order of time."""
    files = [file.read_text().splitlines() for file in folder.glob("notes-*.jsonl")]
    notes = [json.loads(line) for lines in files for line in lines]
    return sorted(notes, key=lambda note: float(note["time"]))


def last_note(folder: Path, pid: int) -> Note:
    """A process's latest."""
    lines = (folder / f"notes-{pid}.jsonl").read_text().splitlines()
    return json.loads(lines[-1]) if lines else {"event": "none", "time": 0.0}


def returns(notes: Iterable[Note]) -> Iterator[Return]:
    """Each time that ranks of the job go back to an earlier step and continue."""
    reached, committed, commits, size, lost = 0, 0, dict[int, Note](), 0, 0
    known = set[int]()
    for note in notes:
        if note["event"] == "step":
            reached = max(reached, note["step"])
        elif note["event"] == "commit":
            committed = max(committed, note["step"])
            commits[note["step"]] = note
        elif note["event"] == "enter":
            shrunk, size = note["size"] < size, note["size"]
            old = note["pid"] in known
            known.add(note["pid"])
            if old and (shrunk or note["step"] < reached):
                before = commits.get(note["step"])
                yield Return(
                    reached,
                    committed,
                    note["step"],
                    before is None or before["weights"] == note["weights"],
                    None if before is None else _apart(note["owed"], before["owed"]),
                    note["lost"] - lost,
                )
                reached, lost = note["step"], note["lost"]


def _apart(now: list[float], before: list[float]) -> float:
    largest = max(map(abs, before)) or 1.0
    return max(abs(a - b) for a, b in zip(now, before, strict=True)) / largest
