"""Jobs on emulated hosts: each is measured by itself, and one file keeps the results of all."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from tqdm import tqdm

import pages
from cluster import Cluster, ClusterError

Job = TypeVar("Job")
Results = dict[str, dict[str, Any]]  # name of a job -> what its ranks found


@dataclass(frozen=True)
class Jobs(Generic[Job]):
    """The jobs of a benchmark.

    Args:
        page: name of the file with the results, and of what pages show of them.
        named: all jobs, in the order of the results.
        measure: runs one job, with the options of the command line.
        options: default and meaning of further options, as `bench.py` takes them.
        indent: of the lines of the file with the results; None: all results in one line.
    """

    page: str
    named: Mapping[str, Job]
    measure: Callable[[Job, argparse.Namespace], dict[str, Any]]
    options: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    indent: int | None = None

    @property
    def path(self) -> Path:
        """The file with the results."""
        return pages.RESULTS / f"{self.page}.json"

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Let a command line name jobs."""
        kinds = f"of {', '.join(self.named)} (default: all)"
        parser.add_argument("jobs", nargs="*", default=[*self.named], type=self._known, help=kinds)
        parser.add_argument("--missing", action="store_true", help="jobs without results alone")

    def _known(self, name: str) -> str:
        if name not in self.named:
            raise argparse.ArgumentTypeError(f"there is no {name!r}, but {', '.join(self.named)}")
        return name

    def main(self, args: argparse.Namespace) -> int:
        """Measure jobs, write results and page, and return the exit status."""
        try:
            self.run(args)
        except ClusterError as error:
            print(f"{self.page}: {error}", file=sys.stderr)
            return 1
        pages.write(self.page)
        return 0

    def run(self, args: argparse.Namespace) -> None:
        """Measure the jobs asked for, and write the results of each when it ends."""
        results: Results = json.loads(self.path.read_text()) if self.path.exists() else {}
        wanted = [key for key in args.jobs if not (args.missing and key in results)]
        for key in (bar := tqdm(wanted, unit="job")):
            bar.set_postfix_str(key)
            results[key] = self.measure(self.named[key], args)
            results = {name: results[name] for name in self.named if name in results}
            self.path.write_text(json.dumps(results, indent=self.indent) + "\n")


def python_path() -> str:
    """What a rank imports: this package, these scripts, and the examples' models and data."""
    return os.pathsep.join(str(pages.ROOT / each) for each in ("", "scripts", "examples"))


def on_hosts(
    command: Sequence[object],
    cluster: Cluster,
    limit_seconds: float,
    settings: Mapping[str, str] | None = None,
    prepare: Callable[[Cluster], None] = lambda _: None,
) -> dict[str, Any]:
    """Run a Python program on all ranks of a cluster, and return the JSON that rank 0 writes.

    settings: further environment variables; prepare: changes the cluster before the job.
    """
    with tempfile.TemporaryDirectory() as folder, cluster as hosts:
        prepare(hosts)
        file = Path(folder) / "found.json"
        horovodrun = str(Path(sys.executable).with_name("horovodrun"))  # sudo's PATH has none
        ranks = [horovodrun, "--gloo", sys.executable, *map(str, command), "--json", str(file)]
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
        hosts.run(ranks, environment | dict(settings or {}), limit_seconds=limit_seconds)
        found: dict[str, Any] = json.loads(file.read_text())
        return found


def on_ranks(
    module: str, job: Any, args: argparse.Namespace, *of_hosts: Any, **more: Any
) -> dict[str, Any]:
    """Call `measure(job, args)` of a benchmark's module on all ranks; return what rank 0 returns.

    of_hosts, more: further arguments of `on_hosts`.
    """
    with tempfile.NamedTemporaryFile() as given:
        Path(given.name).write_bytes(pickle.dumps((job, args)))
        return on_hosts(["-m", "benchmarks.jobs", module, given.name], *of_hosts, **more)


def rank() -> None:
    """Be one of the ranks of `on_ranks`; rank 0 has something to write."""
    _, module, given, _, file = sys.argv
    job, args = pickle.loads(Path(given).read_bytes())
    found = importlib.import_module(f"benchmarks.{module}").measure(job, args)
    if found is not None:
        Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    rank()
