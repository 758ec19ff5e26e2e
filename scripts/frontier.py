"""`make frontier`: trains everything behind docs/frontier.md and writes that page and its pictures.

Quality against bytes for every payload format and exchange, with four ranks in this one process. A
finished run is never repeated, so that the command can be stopped and started again at any time.

    python scripts/frontier.py [--only report]
"""

from __future__ import annotations

import argparse
import signal
import sys

import torch

import launch
from study import lock
from study.frontier import agenda, page, records


def parse() -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("report",), help="a part of the study")
    return parser.parse_args()


def train() -> None:
    """Finishes every stage."""
    for stage in agenda.stages():
        series = stage.series
        lr = agenda.sweep(series)
        name = f"{series.workload} {series.optimizer} {stage.shards}"
        records.finish(stage.cells(lr), name)
    for stage, series in agenda.recipe_stages():
        records.finish(stage.cells(agenda.sweep(series)), f"recipe {stage.series.steps} steps")
    records.finish((cell for _, cell in agenda.ablations()), "ablations")


def main() -> int:
    """Trains what is missing, then writes the report; the exit status is 0 or 130."""
    args = parse()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    torch.set_num_threads(1)  # sums keep their order from run to run
    try:
        if args.only != "report":
            with lock.alone("frontier"):
                train()
    except KeyboardInterrupt:
        return 130
    print(f"written: {page.write().relative_to(launch.ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
