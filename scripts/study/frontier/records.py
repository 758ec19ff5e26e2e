"""Results on disk: JSON lines, one a finished cell, one file a workload."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import harness
import torch
from tqdm import tqdm

import launch
from study.frontier.cells import Cell
from study.frontier.training import train
from study.frontier.workloads import WORKLOADS

FOLDER = launch.ROOT / "docs" / "results"

Record = dict[str, Any]  # as `study.frontier.training.train` returns, with cell and environment


def path_of(workload: str) -> Path:
    """Where the results of a workload's cells are."""
    return FOLDER / f"frontier-{workload}.jsonl"


def finished() -> dict[Cell, Record]:
    """All results."""
    paths = [path for path in map(path_of, WORKLOADS) if path.exists()]
    lines = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    return {Cell(**line["cell"]): line for line in lines}


def finish(cells: Iterable[Cell], description: str) -> None:
    """Trains those that have no result yet."""
    known = finished()
    missing = [cell for cell in dict.fromkeys(cells) if cell not in known]
    for cell in (bar := tqdm(missing, desc=description, unit="run")):
        bar.set_postfix_str(cell.name)
        outcome = train(cell)
        environment = harness.environment({"torch": torch.__version__})
        _append({"cell": asdict(cell)} | outcome | {"environment": environment})


def score(record: Record) -> float | None:
    """The score at the end of a run; None if it diverged."""
    return record["history"][WORKLOADS[record["cell"]["workload"]].column][-1]


def _append(record: Record) -> None:
    path = path_of(record["cell"]["workload"])
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
