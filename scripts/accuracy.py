"""`make accuracy`: trains everything behind docs/accuracy.md and writes that page and its pictures.

For each task it finishes a sweep of learning rates with dense gradients, then compares dense with
TopKEF at the rate chosen. A finished run is never repeated, so that the command can be stopped and
started again at any time.

    python scripts/accuracy.py [--only sweep|TASK|report] [--force]
"""

from __future__ import annotations

import argparse
import signal
import sys

import launch
from study import lock, report, results, trials


def parse() -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = sorted({task.name for task in trials.TASKS})
    parser.add_argument("--only", choices=("sweep", *names, "report"), help="a part of the study")
    parser.add_argument("--force", action="store_true", help="repeat that part's finished runs")
    return parser.parse_args()


def forget(task: trials.Task, only: str | None) -> None:
    """Removes the results that the command would otherwise keep."""
    pattern = f"{task.key}-sweep-*.json" if only == "sweep" else f"{task.key}-*.json"
    for path in results.FOLDER.glob(pattern):
        path.unlink()


def train(only: str | None, force: bool) -> None:
    """Finishes the sweeps and comparisons asked for."""
    for task in trials.TASKS:
        if only not in (None, "sweep", task.name):
            continue
        if force:
            forget(task, only)
        lr = results.sweep(task)
        if only != "sweep":
            results.finish(trials.comparison(task, lr), f"compare {task.key}")


def main() -> int:
    """Trains what is missing, then writes the report; the exit status is 0, 1 or 130."""
    args = parse()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends a run as Ctrl-C does
    try:
        if args.only != "report":
            with lock.alone("accuracy"):
                train(args.only, args.force)
    except launch.RunFailedError as failure:
        print(f"\n{failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(f"written: {report.write().relative_to(launch.ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
