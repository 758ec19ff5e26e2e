"""`horovod-topk compare`: train a script with several compressors and say which one pays.

The command runs once, on one host; it starts horovodrun for every run. This module imports no
framework.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from horovod_topk.cli.compare.settings import (
    SEEDS,
    CompareSettings,
    checked,
    named,
    of_file,
    seeds_of,
)
from horovod_topk.cli.files import check_picture, check_writable
from horovod_topk.cli.options import FILE, FLAG, Options, number, whole

DESCRIPTION = (
    "Train a script with several compressors and say which is worth it. The script passes one of "
    "this package's compressors to Horovod and calls horovod_topk.report(step=..., loss=...). Its "
    "own arguments follow after --."
)


OPTIONS: Options = {
    "script": {"type": Path, "help": "training script, or a TOML file that says what to compare"},
    "--compressors": {
        "nargs": "+",
        "default": (),
        "metavar": "COMPRESSOR",
        "help": "such as 'TopKEF(ratio=0.01)' or 'mine=TopKEF(values=\"int8\")'; dense float32 and "
        "fp16 of Horovod are always compared (default: TopKEF())",
    },
    "--seeds": {
        "nargs": "+",
        "type": whole(),
        "metavar": "SEED",
        "help": f"how many seeds, or two or more of them (default: {SEEDS})",
    },
    "--seed-argument": {
        "metavar": "NAME",
        "help": "the script's option for its seed: seed for --seed",
    },
    "--metric": {"help": "what counts: a reported name, with :higher or :lower where not known"},
    "--target": {
        "type": number(),
        "metavar": "QUALITY",
        "help": "quality whose time and bytes are shown",
    },
    "--budget": {
        "type": number(),
        "metavar": "SECONDS",
        "help": "time at which quality is compared",
    },
    "--ranks -np": {"type": whole(), "metavar": "COUNT", "help": "processes (default: 2)"},
    "--hosts -H": {"metavar": "HOST:SLOTS,...", "help": "hosts, as horovodrun takes them"},
    "--network": {"metavar": "RATE", "help": "emulate one host a rank with such links, as 100mbit"},
    "--simulated": {
        **FLAG,
        "help": "simulated ranks, for quality alone; the script has a function workload(**options)",
    },
    "--jobs": {"type": whole(), "help": "processes that train simulated ranks (default: 1)"},
    "--mpi": {**FLAG, "help": "run over MPI and not over Gloo"},
    "--torchrun": {**FLAG, "help": "run a script with DDP or FSDP2 by torchrun"},
    "--limit": {
        "type": number(),
        "metavar": "SECONDS",
        "help": "end a run that takes longer (default: 3600)",
    },
    "--json": {**FILE, "help": "write figures and verdicts to this file"},
    "--picture": {**FILE, "help": "draw quality against steps, time and bytes"},
    "--out": {
        "type": Path,
        "metavar": "PATH",
        "help": "keep runs in this folder, or in this file if it ends in .jsonl (default: "
        "compare-SCRIPT)",
    },
    "--retry": {**FLAG, "help": "run again what failed, diverged or was cut off"},
    "--no-runs": {**FLAG, "help": "run nothing: report what has been run"},
}
SETTINGS = ("seed_argument", "metric", "target", "budget", "ranks", "hosts", "network", "jobs")


def main(args: argparse.Namespace) -> int:
    """Run all missing runs, and report."""
    every = settings_of(args)
    if args.json is not None:
        check_writable("--json", args.json)
    if args.picture is not None:
        check_picture(args.picture)
    session = importlib.import_module("horovod_topk.cli.compare.session")  # needs the extra
    try:
        status: int = session.main(every, args)
    except KeyboardInterrupt:
        print("interrupted: the same command goes on with the runs that are left", file=sys.stderr)
        return 130
    return status


def settings_of(args: argparse.Namespace) -> list[CompareSettings]:
    """The comparisons that the command line describes: one, or several of a TOML file."""
    given: dict[str, Any] = {
        **{name: getattr(args, name) for name in SETTINGS},
        "arguments": tuple(args.arguments),
        "compressors": named(args.compressors),
        "controller": "torchrun" if args.torchrun else "mpi" if args.mpi else None,
        "limit_seconds": args.limit,
        "simulated": args.simulated or None,
    }
    empty: tuple[object, ...] = (None, (), {})  # not given; 0 is
    asked = {key: each for key, each in given.items() if each not in empty}
    if args.seeds is not None:
        asked["seeds"] = seeds_of(args.seeds[0] if len(args.seeds) == 1 else args.seeds)
    if args.script.suffix == ".toml":
        return [checked(replace(each, **asked)) for each in of_file(args.script)]
    usual = {"script": args.script, "compressors": named(["TopKEF()"])}
    return [checked(CompareSettings(**{**usual, **asked}))]
