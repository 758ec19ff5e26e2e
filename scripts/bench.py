"""Run a benchmark: `python scripts/bench.py NAME [options]`, with --help for its options."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path
from typing import Any

# For every framework that a benchmark loads, so before it loads one.
os.environ |= {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}

MAINS = "def main(args", "\nJOBS = "  # one of them is in the source of every benchmark


def parsed(benchmark: Any, arguments: list[str]) -> argparse.Namespace:
    """Parse the command line of a benchmark by its `OPTIONS`: defaults and meanings by name."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=benchmark.__doc__, formatter_class=form)
    options = getattr(benchmark, "OPTIONS", {})
    if jobs := getattr(benchmark, "JOBS", None):
        jobs.add_to(parser)
        options = jobs.options
    for name, (default, meaning) in options.items():
        kind: Any = {"action": "store_true"} if default is False else {"type": type(default)}
        parser.add_argument(f"--{name}", default=default, help=meaning, **kind)
    return parser.parse_args(arguments)


def main(given: list[str]) -> int:
    """Run the benchmark that the command line names, and return the exit status."""
    sources = sorted(Path(__file__).with_name("benchmarks").glob("*.py"))
    names = [each.stem for each in sources if any(map(each.read_text().count, MAINS))]
    if not given or given[0] not in names:
        sys.exit(f"bench: name one of {', '.join(names)}")
    benchmark = importlib.import_module(f"benchmarks.{given[0]}")
    run = benchmark.main if hasattr(benchmark, "main") else benchmark.JOBS.main
    status: int = run(parsed(benchmark, given[1:]))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
