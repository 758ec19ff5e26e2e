"""`make practice`: what clipping, loss scaling, momentum, restarts and the like cost with TopKEF.

Two ranks train the digits on Gloo, each thing with dense gradients and with TopKEF, five seeds;
writes docs/results/practice.jsonl, docs/practice.md and its picture. A finished run is never
repeated, so that the command can be stopped and started again at any time.

    python scripts/practice.py [--only report]
"""

from __future__ import annotations

import argparse
import sys

import torch

import launch
from study import lock
from study.practice import page, records


def parse() -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("report",), help="a part of it")
    parser.add_argument("--as-rank", nargs=2, type=float, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Trains what is missing, then writes the page; the exit status is 0 or 1."""
    args = parse()
    torch.set_num_threads(1)  # sums keep their order from run to run
    if args.as_rank:
        records.finish_as_rank(*args.as_rank)
        return 0
    try:
        if args.only != "report":
            with lock.alone("practice"):
                records.finish()
    except launch.RunFailedError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"written: {page.write().relative_to(launch.ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
