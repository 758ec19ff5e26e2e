"""Runs a training script once under horovodrun or torchrun, and makes its record."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from horovod_topk import reporting
from horovod_topk.cli.compare.records import DONE, FAILED, LATE, STOPPED, Cell, Point, Record
from horovod_topk.cli.compare.settings import CompareSettings
from horovod_topk.cli.machine import machine
from horovod_topk.cli.process import Ended, follow, rank_of, unprefixed
from horovod_topk.core.run.substitute import VARIABLE
from horovod_topk.cost.quantities import is_number

NETLAB = Path(__file__).resolve().parents[3] / "scripts" / "netlab"
Event = dict[str, Any]  # a line of `horovod_topk.reporting`'s file


def command(settings: CompareSettings, cell: Cell) -> list[str]:
    """The command line of a run."""
    if settings.controller == "torchrun":
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        ranks = f"--nproc-per-node={settings.ranks}"
        return [*torchrun, ranks, str(settings.script), *cell.arguments]
    script = [sys.executable, str(settings.script), *cell.arguments]
    if settings.network is not None:  # scripts/netlab passes hosts and ranks to horovodrun
        lab = [str(NETLAB), "--hosts", str(settings.ranks), "--rate", settings.network, "--"]
        name = str(Path(sys.executable).with_name("horovodrun"))
        return [*lab, name, f"--{settings.controller}", *script]
    where = [] if settings.hosts is None else ["-H", settings.hosts]
    program = [sys.executable, "-m", "horovod_topk.cli.horovodrun"]  # starts seconds faster
    return [*program, "-np", str(settings.ranks), *where, f"--{settings.controller}", *script]


def check_network() -> None:
    """Check that links can be emulated."""
    if not NETLAB.exists():
        raise ValueError(
            f"--network needs {NETLAB.name} of this project's repository, which an installed "
            "package has not. Run `python -m horovod_topk.cli compare` in a checkout"
        )
    if os.geteuid() != 0:
        raise ValueError("--network builds network namespaces and needs root. Run it with sudo")


def run(
    settings: CompareSettings,
    cell: Cell,
    folder: Path,
    go_on: Callable[[Point], bool] | None = None,
) -> Record:
    """Run a script once.

    Args:
        settings, cell: the comparison and the run.
        folder: folder for temporary files, which rank 0 can write to.
        go_on: called with each report while the script runs; once it returns False, it is stopped.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".events") as file:
        events, printed = Path(file.name), Printed()
        seen, stopped = 0, False

        def enough() -> bool:
            nonlocal seen, stopped
            points = _points(_events(events), printed.events)
            new, seen = points[seen:], len(points)
            stopped = go_on is not None and not all(map(go_on, new))
            return stopped

        ended = follow(
            command(settings, cell),
            limit_seconds=settings.limit_seconds,
            on_line=printed.line,
            environment={
                VARIABLE: cell.compressor,
                reporting.REPORT: str(events),
                reporting.SEED: str(cell.seed),
                "PYTHONUNBUFFERED": "1",  # reports are timed when their lines arrive
            },
            enough=None if go_on is None else enough,
        )
        found = _events(events)
    if stopped and ended.status:
        ended = replace(ended, status=0)
        return replace(record_of(settings, cell, ended, found, printed.events), status=STOPPED)
    return record_of(settings, cell, ended, found, printed.events)


def _events(path: Path) -> list[Event]:
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _points(written: Sequence[Event], printed: Sequence[Event]) -> list[Point]:
    """Return the reports of a run as points; none before it has begun."""
    begun, reports = _begun(written), _reports(written, printed)
    return [_point(each, begun["seconds"]) for each in reports] if begun is not None else []


def _begun(written: Sequence[Event]) -> Event | None:
    return next((e for e in written if e["event"] == "compressor"), None)


def _reports(written: Sequence[Event], printed: Sequence[Event]) -> list[Event]:
    """Return the reports that rank 0 has written or, without any, printed."""
    return [e for e in written if e["event"] == "report"] or list(printed)


class Printed:
    """Collects JSON lines with a step that rank 0 prints, from scripts without `report()`."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def line(self, line: str) -> None:
        """Read a line of output."""
        text = unprefixed(line).strip()
        if rank_of(line) not in (None, 0) or not text.startswith("{"):
            return
        try:
            found = json.loads(text)
            step = int(found.pop("step"))
        except (ValueError, KeyError, TypeError):
            return
        numbers = {k: float(v) for k, v in found.items() if isinstance(v, int | float)}
        event = {"event": "report", "seconds": time.monotonic(), "step": step, "metrics": numbers}
        if numbers:
            self.events.append(event)


def record_of(
    settings: CompareSettings,
    cell: Cell,
    ended: Ended,
    written: Sequence[Event],
    printed: Sequence[Event],
) -> Record:
    """The record of a run that has ended."""
    begun, reports = _begun(written), _reports(written, printed)
    problem = ended.problem(settings.limit_seconds)
    status = LATE if ended.late else FAILED if problem else DONE
    if problem:
        problem = f"{problem}\n{ended.tail}"
    elif begun is None:
        status, problem = FAILED, NO_COMPRESSOR
    elif not reports:
        status, problem = FAILED, NO_REPORT
    last: Mapping[str, Any] = reports[-1] if reports else {}
    zero = begun["seconds"] if begun is not None else 0.0
    exchanges = last.get("exchanges") or 0
    return Record(
        cell,
        status,
        problem or "",
        tuple(_point(each, zero) for each in reports),
        last["sent_bytes"] / exchanges if exchanges else None,
        last["dense_bytes"] / exchanges if exchanges else None,
        last["waited"] / last["step"] if last.get("waited") and last["step"] else None,
        last.get("peak_memory"),
        settings.seed_argument is not None or any(e["event"] == "seed" for e in written),
        machine(),
    )


NO_COMPRESSOR = (
    "the script never passed a compressor of horovod_topk to Horovod, so that it trained without "
    "the one that was asked for. Pass compression=TopKEF"
)
NO_REPORT = (
    "the script reported nothing. Call horovod_topk.report(step=..., loss=...) in it, or print "
    'JSON lines such as {"step": 100, "loss": 0.3}'
)


def _point(event: Event, zero: float) -> Point:
    metrics = {k: v if is_number(v) else None for k, v in event["metrics"].items()}
    return Point(event["step"], event["seconds"] - zero, metrics)
