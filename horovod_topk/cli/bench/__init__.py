"""`horovod-topk bench`: time the exchange of a model's gradients with several methods.

Every rank runs it, under `horovodrun` or `torchrun`; rank 0 prints. This module imports no
framework before the command runs.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path

from horovod_topk.cli.bench.compute import Compute
from horovod_topk.cli.bench.figures import read_result
from horovod_topk.cli.bench.methods import (
    DEFAULT,
    DEFAULT_OF_SCRIPT,
    DEFAULT_OF_TORCHRUN,
    KINDS,
    Method,
    first_of_fsdp,
    parse_methods,
)
from horovod_topk.cli.doctor.finding import is_installed
from horovod_topk.cli.files import check_picture, check_writable, prints
from horovod_topk.cli.launcher import by_torchrun
from horovod_topk.cli.models import specs_of
from horovod_topk.cli.options import FILE, Options, quantity, shared, whole
from horovod_topk.cost.quantities import bits_per_second

SHORTHAND = "topk-int4, topk-int8-sharded or topk:values=int8,exchange=sharded"
MOST_ROUNDS, MOST_IDLE = 100_000, 10_000

DESCRIPTION = (
    "Time the exchange of a model's gradients with several methods in turn, on real ranks. Run it "
    "under horovodrun, or under torchrun without Horovod, on every rank; rank 0 prints a table of "
    "seconds and bytes a step."
)
OPTIONS: Options = {
    **shared("--model", "--optimizer"),
    "--methods": {
        "metavar": "LIST",
        "help": f"methods to time, with commas between them: {', '.join(KINDS)}; settings of "
        f"TopKEF as in {SHORTHAND}; other compressors as in Python, 'QSGD(bits=2)'; over torch DDP "
        "as in ddp+topk; between nodes of FSDP2 as in fsdp+topk; with an outer step of LocalSteps "
        "after each step as in local+topk "
        f"(default: {DEFAULT}; under torchrun: {DEFAULT_OF_TORCHRUN}; with "
        f"--script: {DEFAULT_OF_SCRIPT})",
    },
    "--rounds": {
        "type": whole(1, MOST_ROUNDS),
        "default": 5,
        "metavar": "STEPS",
        "help": "timed steps of each method, 1 or more (default: %(default)s)",
    },
    "--compute": {
        "type": quantity(Compute.of),
        "metavar": "KIND:SECONDS",
        "help": "simulated backward of each step: sleep:0.2 sleeps for 0.2 s, cpu:0.2 uses a core "
        "for 0.2 s (default: none)",
    },
    "--idle-parameters": {
        "type": whole(0, MOST_IDLE),
        "default": 0,
        "metavar": "COUNT",
        "help": "parameters without a gradient; not with powersgd (default: %(default)s)",
    },
    "--interface": {
        "metavar": "NAME",
        "help": "network interface whose bytes are counted, such as eth0 (default: the one that "
        "horovodrun uses)",
    },
    "--rate": {
        "type": quantity(bits_per_second),
        "help": "bandwidth of its link, for the picture, such as 1gbit (default: what the network "
        "card reports)",
    },
    "--script": {
        **FILE,
        "help": "training script to time instead of a model's gradients; its own arguments follow "
        "after -- (default: none)",
    },
    "arguments": {"nargs": "*", "help": "arguments of the script"},
    "--json": {**FILE, "help": "write the results to this file (default: no file)"},
    "--picture": {
        **FILE,
        "help": "draw time against bandwidth into this file, such as bench.png; needs matplotlib "
        "(default: no picture)",
    },
    "--beside": {
        "type": Path,
        "nargs": "*",
        "default": [],
        "metavar": "FILE",
        "help": "earlier results of --json to draw in the same picture (default: none)",
    },
}


def main(args: argparse.Namespace) -> int:
    """Measure and report."""
    specs, methods = specs_of(args.model), parse_methods(args.methods or _usual(args))
    _check(args, methods)
    beside = [read_result(path) for path in args.beside] if prints() else []
    run = importlib.import_module("horovod_topk.cli.bench.run")  # loads PyTorch
    status: int = run.main(args, specs, methods, beside)
    return status


def _usual(args: argparse.Namespace) -> str:
    if args.script is not None:
        return DEFAULT_OF_SCRIPT
    usual = DEFAULT_OF_TORCHRUN if by_torchrun() else DEFAULT
    leave_out = args.idle_parameters or not is_installed("numpy")  # torch's needs NumPy
    return usual.replace("powersgd,", "") if leave_out else usual


def _check(args: argparse.Namespace, methods: Sequence[Method]) -> None:
    """Refuse options that exclude each other, and files that cannot be written.

    PowerSGD's collectives start in callbacks, and DDP finds idle parameters by one more collective.
    Their order differs from rank to rank, and on Gloo ranks then abort.
    """
    if args.idle_parameters and any(method.kind == "powersgd" for method in methods):
        raise ValueError(
            f"--idle-parameters {args.idle_parameters} with powersgd: torch's ranks abort, as its "
            "collectives meet in different orders. Leave powersgd out of --methods"
        )
    if args.idle_parameters and (fsdp := first_of_fsdp(methods)):
        raise ValueError(
            f"--idle-parameters {args.idle_parameters} with {fsdp}: FSDP2's rows have none. Leave "
            "one of the two out"
        )
    if args.script is None and args.arguments:
        raise ValueError(f"{' '.join(args.arguments)}: arguments of what? Give --script as well")
    if args.script is not None:
        _check_script(args)
    if args.json is not None:
        check_writable("--json", args.json)
    if args.picture is not None:
        check_picture(args.picture)


def _check_script(args: argparse.Namespace) -> None:
    if not args.script.is_file():
        raise ValueError(f"--script {args.script}: no such file")
    if args.compute is not None or args.idle_parameters:
        raise ValueError("--script computes by itself: leave out --compute and --idle-parameters")
    if args.optimizer is not None:
        raise ValueError("--script has an optimizer of its own: leave out --optimizer")
