"""`make plan-grid`: `horovod-topk plan` against measured steps, constants fitted on other cells.

The hosts of a cell are network namespaces of this machine (`scripts/cluster`) with one rank each.
They share this machine's cores. On the cells for fitting, collectives are timed. On the others,
steps are timed: without exchange (the plan's compute time), dense, and TopKEF. Writes
docs/results/plan-grid.json and docs/plan-grid.md.

    sudo make plan-grid                                # all cells: an hour and a half
    sudo make plan-grid ARGS="--missing"               # cells without results
    sudo make plan-grid ARGS="2:100mbit:resnet18 3:200mbit:fit"
    sudo make plan-grid ARGS="--ours"                  # all but dense: three quarters of an hour
    make plan-grid ARGS="--page"                       # the page alone, from stored results

The authors' bias: they want the plan to be right. Cells and models were given before anything was
measured, and all of them are reported.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import launch
from cluster import Cluster, ClusterError, Link
from horovod_topk.cli.machine import machine
from horovod_topk.cost import machine as machines
from planning import report
from planning.grid import CELLS, FITTED, Cell
from planning.guesses import machine_of
from runs import Runs

LIMIT_SECONDS = 1800.0  # a cell
RANK = launch.ROOT / "scripts" / "planning" / "rank.py"
KEPT = Runs(CELLS, launch.ROOT / "docs" / "results" / "plan-grid.json")
PAGE = launch.ROOT / "docs" / "plan-grid.md"


def measure(cell: Cell, *options: str) -> dict[str, Any]:
    """Run one cell's job. Options are those of `planning/rank.py`.

    Raises:
        ClusterError: it failed.
    """
    there = machine()  # its load: before
    with tempfile.TemporaryDirectory() as folder, Cluster(cell.hosts, Link.of(cell.rate)) as hosts:
        found = Path(folder) / "found.json"
        model = ["--model", cell.model] if cell.model else []
        arguments = ["--json", str(found), *model, *options]
        hosts.run(
            ["horovodrun", "--gloo", sys.executable, str(RANK), *arguments],
            {"OMP_NUM_THREADS": "1", "PYTHONPATH": launch.python_path()},
            limit_seconds=LIMIT_SECONDS,
        )
        job: dict[str, Any] = json.loads(found.read_text())
    return {**job, "machine": there}


def again(cell: Cell) -> dict[str, Any]:
    """Measure a cell again, but keep its dense steps and the cells for fitting.

    Raises:
        ClusterError: a job failed.
    """
    kept: dict[str, Any] = json.loads(KEPT.path.read_text())[cell.name]
    if cell.model is None:
        return kept
    job = measure(cell, "--without-dense")
    return {**job, "repeats": {**kept["repeats"], **job["repeats"]}}


def main() -> int:
    """Measure and write; the exit status."""
    parser = KEPT.parser(__doc__)
    parser.add_argument(
        "--machine", type=Path, help="write the fitted constants here, for ranks with a core each"
    )
    parser.add_argument("--ours", action="store_true", help="keep the stored dense steps")
    args = KEPT.parse(parser)
    try:
        jobs = KEPT.measure(args, again if args.ours else measure)
    except ClusterError as error:
        print(f"plan-grid: {error}", file=sys.stderr)
        return 1
    report.write(jobs, PAGE)
    print(f"written: {PAGE.relative_to(launch.ROOT)}")
    if args.machine:
        fitted = machine_of([jobs[cell.name] for cell in FITTED])
        machines.write(replace(fitted, cores=None), args.machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
