"""What every rank does around a case: select by world size, wait for the others, clean up.

A case that fails on one rank may leave another inside a collective. Ranks therefore meet after
every case by way of files, not of Horovod; one that waits in vain ends the launch.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path

import horovod.torch as hvd
import pytest
import torch

FOLDER = Path(os.environ["HOROVOD_TOPK_TEST_FOLDER"])
PATIENCE = 60.0  # seconds for the others to end a case that this rank has passed
PATIENCE_AFTER_FAILURE = 6.0  # they probably wait for this rank, inside a collective


def without_compiler() -> None:
    """Spare each rank the import of torch's compiler, seconds long, on its first optimizer step.

    torch asks it for two things there: to leave a function uncompiled, and to stop compiling.
    """
    compiler = types.ModuleType("torch._dynamo")
    compiler.disable = lambda function, *args, **kwargs: function
    compiler.graph_break = lambda: None
    sys.modules.setdefault(compiler.__name__, compiler)


def pytest_configure(config: pytest.Config) -> None:
    without_compiler()
    hvd.init()
    torch.set_num_threads(1)
    config.pluginmanager.register(Meeting(), "meeting")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mine = [item for item in items if hvd.size() in _sizes(item)]
    chosen = {id(item) for item in mine}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen])
    items[:] = mine
    gc.freeze()  # what is imported by now need not be searched after every case


@pytest.fixture(autouse=True)
def _forget_optimizers() -> Iterator[None]:
    """Horovod's optimizers are reference cycles: end them with the case that made them."""
    yield
    gc.collect()


@pytest.fixture
def pair() -> Iterator[hvd.ProcessSet]:
    """A process set of ranks 0 and 1."""
    process_set = hvd.add_process_set([0, 1])
    yield process_set
    hvd.remove_process_set(process_set)


class Meeting:
    """Writes each case's outcome to this rank's file and waits until every rank's is there."""

    def __init__(self) -> None:
        self._files = [FOLDER / f"rank-{rank}.jsonl" for rank in range(hvd.size())]
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
            "rank": hvd.rank(),
            "case": nodeid,
            "passed": passed,
            "seconds": self._seconds,
            "report": "\n".join(self._reports),
        }
        with self._files[hvd.rank()].open("a") as file:
            file.write(json.dumps(outcome) + "\n")
        self._cases += 1
        self._seconds, self._reports = 0.0, []
        if not self._met(PATIENCE if passed else PATIENCE_AFTER_FAILURE):
            print(f"rank {hvd.rank()}: other ranks have not ended {nodeid}", flush=True)
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


def _sizes(item: pytest.Item) -> tuple[int, ...]:
    mark = item.get_closest_marker("world_size")
    return mark.args if mark else (2,)
