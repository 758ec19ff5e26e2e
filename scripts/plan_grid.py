"""`horovod-topk plan` against measured steps, its constants fitted on other cells.

Cells are hosts that are namespaces of this machine (`scripts/cluster`), one rank each. On the cells
to fit on, collectives are timed; on those to guess, steps as well: without any exchange (which is
the plan's compute), dense, and ours. All ranks share this machine's cores.

    sudo python scripts/plan_grid.py --fit 3:200mbit 6:500mbit --json grid.json
    sudo python scripts/plan_grid.py --guess 2:100mbit --models resnet18 --fit 2:200mbit
    python scripts/plan_grid.py --again docs/results/plan-cells.json --publish    # measures nothing

Besides errors it counts in how many cells the plan's verdict, compress or not, is the measured one
(`planning.agreement`); --publish puts that into docs/plan.md.

The authors' bias: they want the plan to be right. Cells and models are given before anything is
measured, and all of them are reported.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import launch
from cluster import Cluster, ClusterError, Link
from horovod_topk.cli.models import MODELS, known_specs
from horovod_topk.cli.processor import cpu_model
from horovod_topk.config import TopKConfig
from horovod_topk.cost import machine as machines
from horovod_topk.cost.fit import Sample, fit
from horovod_topk.cost.machine import Kernels, Machine
from horovod_topk.cost.sending import Sending
from horovod_topk.cost.step import Training, step
from horovod_topk.cost.traffic import nodes_of
from horovod_topk.cost.ways import Way, compressed, dense
from planning import agreement
from planning.rank import WAYS

GRID = [f"{hosts}:{rate}" for hosts in (2, 4, 8) for rate in ("100mbit", "300mbit", "1gbit")]
FIT = ["3:200mbit", "6:200mbit", "3:600mbit"]
LIMIT_SECONDS = 1800.0  # a cell
RANK = launch.ROOT / "scripts" / "planning" / "rank.py"
PAGE = launch.ROOT / "docs" / "plan.md"
BEGIN = "<!-- verdicts, by scripts/plan_grid.py --publish -->"
END = "<!-- end of verdicts -->"


@dataclass(frozen=True)
class Cell:
    """Hosts, and the rate of their links."""

    hosts: int
    rate: str

    @classmethod
    def of(cls, text: str) -> Cell:
        """Of "2:100mbit"."""
        hosts, rate = text.split(":")
        return cls(int(hosts), rate)

    def measure(self, models: Sequence[str], steps: int) -> dict[str, Any]:
        """What a job on it found."""
        link = Link.of(self.rate)
        with tempfile.TemporaryDirectory() as folder, Cluster(self.hosts, link) as cluster:
            found = Path(folder) / "found.json"
            arguments = ["--json", str(found), "--steps", str(steps), "--models", *models]
            cluster.run(
                ["horovodrun", "--gloo", sys.executable, str(RANK), *arguments],
                {"OMP_NUM_THREADS": "1", "PYTHONPATH": launch.python_path()},
                limit_seconds=LIMIT_SECONDS,
            )
            job: dict[str, Any] = json.loads(found.read_text())
        return {"rate": link.rate, "cores": os.cpu_count(), "load": os.getloadavg()[0], **job}


def machine_of(jobs: Sequence[dict[str, Any]]) -> Machine:
    """Constants of what was measured on the cells to fit on."""
    cores = float(jobs[0].get("cores") or os.cpu_count() or 1)
    samples = [
        Sample(Sending(**sending), took, max(1.0, job["ranks"] / cores), job["rate"])
        for job in jobs
        for sending, took in job["samples"]
    ]
    each = [Kernels(**job["kernels"]) for job in jobs]
    names = Kernels.__dataclass_fields__
    kernels = Kernels(**{name: min(getattr(k, name) for k in each) for name in names})
    cells = ", ".join(f"{job['ranks']} hosts at {job['rate'] / 1e6:g} Mbit/s" for job in jobs)
    origin = (
        f"fitted by scripts/plan_grid.py on {cells}, {cpu_model()}, {time.strftime('%Y-%m-%d')}"
    )
    return Machine(fit(samples), kernels, cores, origin=origin)


def guesses(machine: Machine, job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Of each model and way: measured, planned, and the error's share."""
    nodes = nodes_of(job["ranks"], 1)
    network = {**vars(machine.network), "bandwidth": job["rate"]}
    there = Machine(type(machine.network)(**network), machine.kernels, machine.cores, job["ranks"])
    for model, steps in job["steps"].items():
        training = Training(steps["none"])
        for exchange, values in WAYS[1:]:
            way = _way(model, exchange, values, nodes)
            planned = step(way, there, training, overlap=True).seconds
            measured = steps[f"{exchange} {values}"]
            repeats = job.get("repeats", {}).get(model, {}).get(f"{exchange} {values}")
            yield {
                "hosts": job["ranks"],
                "rate": job["rate"],
                "model": model,
                "way": way.name,
                "measured": measured,
                "planned": planned,
                "error": abs(planned - measured) / measured,
                **({"repeats": repeats} if repeats else {}),
            }


def _way(model: str, exchange: str, values: str, nodes: Any) -> Way:
    specs = known_specs(model)
    if exchange == "allreduce":
        return dense(specs, nodes)
    return compressed(specs, nodes, exchange, TopKConfig(values=values))


def publish(rows: Sequence[dict[str, Any]], page: Path = PAGE) -> None:
    """Put the verdicts into the page, between its marks."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{agreement.markdown(rows)}\n{END}{after}")


def write(path: Path, fitted: list[Any], guessed: list[Any], rows: list[Any]) -> None:
    """Keep all that was measured, and what it comes to."""
    found = {
        "fit": fitted,
        "guess": guessed,
        "rows": rows,
        "verdicts": [
            {**asdict(each), "agrees": each.agrees, "same_way": each.same_way}
            for each in agreement.verdicts(rows)
        ],
        "summary": agreement.summary(rows),
    }
    path.write_text(json.dumps(found, indent=1))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fit", nargs="+", default=FIT, metavar="HOSTS:RATE")
    parser.add_argument("--guess", nargs="+", default=GRID, metavar="HOSTS:RATE")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path, help="keep all that was measured")
    parser.add_argument("--again", type=Path, help="take what --json kept, and measure nothing")
    parser.add_argument("--publish", action="store_true", help="put the verdicts into docs/plan.md")
    parser.add_argument(
        "--machine", type=Path, help="keep the constants, of ranks with a core each"
    )
    args = parser.parse_args()
    if shared := set(args.fit) & set(args.guess):
        parser.error(f"{', '.join(sorted(shared))}: fitted on and guessed; take other cells")
    return args


def cells(args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What was found on those to fit on, and on those to guess.

    Raises:
        ClusterError: a cell cannot be measured.
    """
    if args.again:
        kept = json.loads(args.again.read_text())
        return kept["fit"], kept["guess"]
    fitted = [Cell.of(text).measure([], args.steps) for text in args.fit]
    return fitted, [Cell.of(text).measure(args.models, args.steps) for text in args.guess]


def main() -> int:
    """Measure, guess, compare; the exit status."""
    args = parse()
    try:
        fitted, guessed = cells(args)
    except ClusterError as error:
        print(f"plan-grid: {error}", file=sys.stderr)
        return 1
    machine = machine_of(fitted)
    rows = [row for job in guessed for row in guesses(machine, job)]
    if args.json:
        write(args.json, fitted, guessed, rows)
    if args.machine:
        machines.write(replace(machine, cores=None), args.machine)
    if args.publish:
        publish(rows)
    print(machine.network)
    report(rows)
    return 0


def percentile(ascending: Sequence[float], share: float) -> float:
    """By nearest rank: the least that so large a share of all does not exceed."""
    return ascending[math.ceil(share * len(ascending)) - 1]


def report(rows: Sequence[dict[str, Any]]) -> None:
    """Print steps, errors and verdicts."""
    for row in rows:
        spread = agreement.spread(row)
        print(
            f"{row['hosts']} hosts {row['rate'] / 1e6:6.0f} Mbit/s  {row['model']:<10}"
            f"{row['way']:<20}{row['measured']:8.3f} s measured{row['planned']:8.3f} s planned"
            f"{row['error']:8.0%}" + ("" if spread is None else f", repeats within {spread:.0%}")
        )
    errors = sorted(row["error"] for row in rows)
    tenth = percentile(errors, 0.9)
    print(f"median error {statistics.median(errors):.0%}, 90th percentile {tenth:.0%}")
    print(agreement.markdown(rows))


if __name__ == "__main__":
    sys.exit(main())
