#!/usr/bin/env python3
"""Seconds a step of local steps on distant hosts, beside an exchange in every step.

    sudo scripts/netlab --hosts 4 --rate 100mbit --delay 50ms -- \
        .venv/bin/python scripts/benchmarks/local_steps.py

starts a rank on each emulated host (`local_steps_rank.py`), over torch.distributed with Gloo, and
keeps the seconds in docs/results/local_steps_seconds.json. The model is a transformer of 25 million
parameters with AdamW. All variants take turns in every round; each is built anew, and takes a few
steps that are not counted. Local steps are timed over whole rounds of 30 steps, with one exchange
each. The first variant exchanges nothing: its seconds are the compute of a step.

The authors' bias: they want local steps to win.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs/results/local_steps_seconds.json"
HOSTS, PORT = 4, 29557
EVERY = 30  # inner steps
PARTS = ("compress_seconds", "exposed_seconds", "decompress_seconds")  # of a step, not compute
ALONE, LOCAL = "compute alone", "local steps"
FLOAT16, BFLOAT16, EVERY_STEP = "PyTorch's float16", '`Dense(values="bfloat16")`', "`TopKEF()`"

Result = Mapping[str, list[float]]  # a list has a number of each round


def launch(arguments: Sequence[str]) -> int:
    """Start a rank on each host, and return the exit status of the first."""
    script = Path(__file__).with_name("local_steps_rank.py")
    common = {"WORLD_SIZE": HOSTS, "LOCAL_RANK": 0, "MASTER_ADDR": "host1", "MASTER_PORT": PORT}
    common |= {
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": 1,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}",
    }

    def command(rank: int) -> list[str]:
        settings = [f"{key}={value}" for key, value in {**common, "RANK": rank}.items()]
        return ["env", "-C", str(ROOT), *settings, sys.executable, str(script), *arguments]

    others = [
        subprocess.Popen(["ssh", f"host{rank + 1}", *command(rank)], stdin=subprocess.DEVNULL)
        for rank in range(1, HOSTS)
    ]
    try:
        return subprocess.run(command(0), check=False).returncode
    finally:
        for each in others:
            each.wait(timeout=60)


def computing(found: Result, alone: float) -> float:
    """The share of a step that is neither encoding, decoding nor waiting for others.

    Where a variant does not measure these, it is the share of the seconds without an exchange.
    """
    spent = [sum(parts) for parts in zip(*(found[part] for part in PARTS), strict=True)]
    if any(spent):
        shares = zip(spent, found["seconds"], strict=True)
        return 1.0 - statistics.median(each / seconds for each, seconds in shares)
    return min(1.0, alone / statistics.median(found["seconds"]))


def rows(found: Mapping[str, Result]) -> list[list[str]]:
    """A row for each variant: seconds a step, how much of it is compute, bytes, and a factor."""
    medians = {name: statistics.median(each["seconds"]) for name, each in found.items()}
    lines = []
    for name, each in found.items():
        sent, exchange = (statistics.median(each[key]) for key in ("bytes", "exchange"))
        lines.append(
            [
                name,
                f"{medians[name]:.2f} s ({min(each['seconds']):.2f} to {max(each['seconds']):.2f})",
                f"{100 * computing(each, medians[ALONE]):.1f}%",
                "-" if name == ALONE else f"{sent / 1e6:.3g} MB",
                "-" if name == ALONE else f"{exchange / 1e6:.3g} MB",
                f"{medians[name] / medians[LOCAL]:.2f}",
            ]
        )
    return lines


def values(stored: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The page's tables, one for each number of sequences in a step: `table_1` and so on."""
    head = ["", "a step", "compute", "sent a step", "an exchange", "times local steps' seconds"]
    tables = {}
    for sequences, measured in stored.items():
        lines = [head, ["---"] * len(head), *rows(measured["variants"])]
        tables[f"table_{sequences}"] = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return tables


def main() -> int:
    """Measure, and keep what was measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--rows", type=int, default=2, help="sequences of a rank in a step")
    parser.add_argument("--every", type=int, default=EVERY, help="inner steps of a round")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    numbers = {"rounds": args.rounds, "rows": args.rows, "every": args.every}
    given = [f"--{name}={number}" for name, number in numbers.items()]
    status = launch([*given, f"--results={args.results.absolute()}"])
    if status == 0:
        print(values(json.loads(args.results.read_text()))[f"table_{args.rows}"])
    return status


if __name__ == "__main__":
    sys.exit(main())
