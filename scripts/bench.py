"""Run a benchmark: `python scripts/bench.py NAME [options]`, with --help for its options."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

# For every framework that a benchmark loads, so before it loads one.
os.environ |= {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}


def main() -> int:
    """Run the benchmark that the command line names, and return the exit status."""
    folder = Path(__file__).with_name("benchmarks")
    names = [each.stem for each in sorted(folder.glob("*.py")) if "def main(a" in each.read_text()]
    if len(sys.argv) < 2 or sys.argv[1] not in names:
        sys.exit(f"bench: name one of {', '.join(names)}")
    _, name, *arguments = sys.argv
    status: int = importlib.import_module(f"benchmarks.{name}").main(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main())
