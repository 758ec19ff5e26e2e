"""`make residuals`: norms of residuals over a training run, beside the bounds of theory (minutes).

Four ranks in this one process train the digits with shards that are alike, that differ, and with a
rank that has no data now and then; writes docs/results/residuals.json, docs/residuals.md and its
picture.

    python scripts/residuals.py [--only report]
"""

from __future__ import annotations

import argparse
import sys

import torch

import launch
from study.residuals import page, records


def main() -> int:
    """Trains, then writes the page; the exit status is 0 or 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("report",), help="a part of it")
    args = parser.parse_args()
    torch.set_num_threads(1)  # sums keep their order from run to run
    if args.only != "report":
        records.write()
    print(f"written: {page.write().relative_to(launch.ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
