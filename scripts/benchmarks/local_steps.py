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
                f"{100 * min(1.0, medians[ALONE] / medians[name]):.1f}%",
                "-" if name == ALONE else f"{sent / 1e6:.3g} MB",
                "-" if name == ALONE else f"{exchange / 1e6:.3g} MB",
                f"{medians[name] / medians[LOCAL]:.2f}",
            ]
        )
    return lines


def values(stored: Mapping[str, Any]) -> dict[str, str]:
    """The page's table."""
    head = ["", "a step", "compute", "sent a step", "an exchange", "times local steps' seconds"]
    lines = [head, ["---"] * len(head), *rows(stored["variants"])]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    setting = stored["setting"]
    return {"table": table, **{key: f"{each:,}" for key, each in setting.items()}}


def main() -> int:
    """Measure, and keep what was measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--rows", type=int, default=4, help="sequences of a rank in a step")
    parser.add_argument("--every", type=int, default=EVERY, help="inner steps of a round")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    numbers = {"rounds": args.rounds, "rows": args.rows, "every": args.every}
    given = [f"--{name}={number}" for name, number in numbers.items()]
    args.results.unlink(missing_ok=True)
    status = launch([*given, f"--results={args.results.absolute()}"])
    if status == 0:
        print(values(json.loads(args.results.read_text()))["table"])
    return status


if __name__ == "__main__":
    sys.exit(main())
