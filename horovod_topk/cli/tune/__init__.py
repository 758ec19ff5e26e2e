"""`horovod-topk tune`: search the settings of a script under a budget, with Optuna.

It makes the runs of `compare`, one after another, and keeps them in the same way. This module
imports no framework.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable

from horovod_topk.cli import compare
from horovod_topk.cli.options import RATE, SHARED, TIME, Options, quantity, shared, whole
from horovod_topk.cli.plan import arguments as plan

DESCRIPTION = (
    "Search method, ratio, values, exchange and local steps for a script, under a budget of bytes, "
    "of step time or of quality lost. It is a script for `compare`. Its own arguments follow "
    "after --."
)
SEEDS, RUNS = 3, 30


def _above_0(unit: str, example: str, scale: float = 1.0) -> Callable[[str], float]:
    """Make the type of an option that is a number above 0 with its unit."""

    def read(text: str) -> float:
        try:
            found = float(text.removesuffix(unit)) if text.endswith(unit) else 0.0
        except ValueError:
            found = 0.0
        if not 0 < found < 1e9:
            raise ValueError(f"{text!r}: give a number above 0 with its unit, such as {example}")
        return found * scale

    return quantity(read)


OPTIONS: Options = {
    "script": {**compare.OPTIONS["script"], "help": "training script, or a TOML file of `compare`"},
    "--bytes": {
        "type": _above_0("x", "50x"),
        "metavar": "TIMES",
        "help": "send so many times fewer bytes than dense float32, as in 50x, and lose the least "
        "quality",
    },
    "--step-time": {
        **TIME,
        "help": "take so long for a step at most, as `plan` predicts it, and lose the least "
        "quality; needs --bandwidth and --compute",
    },
    "--quality": {
        "type": _above_0("%", "1%", 0.01),
        "metavar": "SHARE",
        "help": "lose this share of dense's quality at most, as in 1%%, and send the fewest bytes, "
        "or with --bandwidth take the shortest step",
    },
    "--bandwidth": {**RATE, "help": "bandwidth of a node's network card, as in 1gbit"},
    "--compute": {**plan.OPTIONS["--compute"], "required": False},
    **shared("--local-size"),
    "--model": {
        **SHARED["--model"],
        "default": None,
        "help": "gradients' shapes, as for `plan`, of which bytes follow; not with --simulated",
    },
    **shared("--optimizer"),
    "--runs": {
        "type": whole(1, 100_000),
        "default": RUNS,
        "help": "make as many steps as so many whole runs have, at most (default: %(default)s)",
    },
    "--seeds": {
        "type": whole(1, 1000),
        "default": SEEDS,
        "help": "seeds for the best settings, the default and dense (default: %(default)s)",
    },
    "--search-seed": {
        "type": whole(0, 2**32 - 1),
        "default": 0,
        "metavar": "SEED",
        "help": "seed of the search itself (default: %(default)s)",
    },
    **{
        name: compare.OPTIONS[name]
        for name in ("--seed-argument", "--metric", "--ranks -np", "--hosts -H", "--simulated")
    },
    **{name: compare.OPTIONS[name] for name in ("--mpi", "--torchrun", "--limit", "--out")},
}
UNUSED = dict.fromkeys(("target", "budget", "network", "jobs"))  # options of `compare` alone


def main(args: argparse.Namespace) -> int:
    """Check the options, search, and print a report."""
    described = args.bandwidth is not None, args.compute is not None
    if args.bytes is args.step_time is args.quality is None:
        raise ValueError("what may it cost? Give --bytes 50x, --step-time 100ms or --quality 1%")
    if any(described) != all(described) or (args.step_time and not any(described)):
        raise ValueError("to predict a step's time, give --bandwidth 1gbit and --compute 60ms")
    given = {**vars(args), **UNUSED, "compressors": ["TopKEF()"], "seeds": [args.seeds]}
    every = compare.settings_of(argparse.Namespace(**given))
    if len(every) > 1 or every[0].grid:
        raise ValueError(f"{args.script} has several comparisons. Give a file with one")
    if args.model is None and not every[0].simulated:
        raise ValueError(
            "the bytes of settings follow from the gradients' shapes. Give --model shapes.json: "
            "an object from names to shapes"
        )
    importlib.import_module("optuna")
    session = importlib.import_module("horovod_topk.cli.tune.session")  # needs the extra
    status: int = session.main(every[0], args)
    return status
