"""What ranks of either framework do around their cases: choose them, and wait for each other.

A case that fails on one rank may leave another inside a collective. Ranks therefore meet after
every case by way of files, not of Horovod; one that waits in vain ends the launch.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path

import pytest

from launches import runs

FOLDER = Path(os.environ["HOROVOD_TOPK_TEST_FOLDER"])
TIER, CONTROLLER = os.environ["HOROVOD_TOPK_TEST_LAUNCHED_AS"].split()
PATIENCE = 150.0  # seconds for the others to end a case that this rank has passed
PATIENCE_AFTER_FAILURE = 15.0  # they probably wait for this rank, inside a collective


def choose(config: pytest.Config, items: list[pytest.Item], size: int) -> None:
    """Keep the cases of this launch and tier."""
    ordinals = _ordinals(items)
    mine = [item for item in items if _runs(item, size, ordinals[item.nodeid])]
    chosen = {id(item) for item in mine}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen])
    items[:] = mine


class Meeting:
    """Writes each case's outcome to this rank's file and waits until every rank's is there."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._files = [FOLDER / f"rank-{other}.jsonl" for other in range(size)]
        self._cases = 0
        self._seconds, self._reports = 0.0, list[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds += report.duration
        if report.failed:
            sections = [f"--- {title}\n{text}" for title, text in report.sections]
            self._reports.append("\n".join([str(report.longrepr), *sections]))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        passed = not self._reports
        outcome = {
            "rank": self._rank,
            "case": nodeid,
            "passed": passed,
            "seconds": self._seconds,
            "report": "\n".join(self._reports),
        }
        with self._files[self._rank].open("a") as file:
            file.write(json.dumps(outcome) + "\n")
        self._cases += 1
        self._seconds, self._reports = 0.0, []
        if not self._met(PATIENCE if passed else PATIENCE_AFTER_FAILURE):
            print(f"rank {self._rank}: other ranks have not ended {nodeid}", flush=True)
            os._exit(3)  # an orderly exit could wait for them too

    def _met(self, patience: float) -> bool:
        deadline = time.monotonic() + patience
        while not all(_lines(file) >= self._cases for file in self._files):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        return True


def _lines(file: Path) -> int:
    try:
        return file.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def _ordinals(items: list[pytest.Item]) -> dict[str, int]:
    """Where each case is among those of the same function."""
    seen, found = Counter[str](), {}
    for item in items:
        function = item.nodeid.split("[")[0]
        found[item.nodeid] = seen[function]
        seen[function] += 1
    return found


def _runs(item: pytest.Item, size: int, ordinal: int) -> bool:
    under_torchrun = CONTROLLER == "torchrun"
    if under_torchrun and item.get_closest_marker("horovod"):
        return False
    if os.environ.get("TEST_ADAPTER") == "fsdp" and item.get_closest_marker("whole"):
        return False
    sizes, everywhere, part = map(item.get_closest_marker, ("world_size", "everywhere", "one_in"))
    beside = everywhere.kwargs.get("one_in", 1) if everywhere else 1
    skipped = part and ordinal % part.args[0] != part.kwargs.get("first", 0)
    return runs(
        TIER,
        CONTROLLER,
        size,
        sizes=sizes.args if sizes else (2,),
        everywhere=everywhere is not None and ordinal % beside == 0,
        slow=bool(skipped or item.get_closest_marker("slow") or (under_torchrun and ordinal % 4)),
    )
