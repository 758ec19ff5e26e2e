"""`horovod-topk bench`: time the exchange of a model's gradients with several methods.

Every rank runs it, under `horovodrun` or `torchrun`; rank 0 prints. This module imports no
framework before the command runs.
"""

from __future__ import annotations

import argparse
import importlib
import sys
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
    parse_methods,
)
from horovod_topk.cli.doctor.finding import is_installed
from horovod_topk.cli.files import check_picture, check_writable, prints
from horovod_topk.cli.launcher import by_torchrun
from horovod_topk.cli.models import MODELS, specs_of
from horovod_topk.cli.options import (
    add_model,
    add_optimizer,
    check_whole,
    given,
    whole,
)
from horovod_topk.cost.quantities import bits_per_second
from horovod_topk.errors import TopKError

SHORTHAND = "topk-int4, topk-int8-sharded or topk:values=int8,exchange=sharded"
CALL = "'QSGD(bits=2)'"
MOST_ROUNDS, MOST_IDLE = 100_000, 10_000


DESCRIPTION = (
    "Time the exchange of a model's gradients with several methods in turn, on real ranks. Run it "
    "under horovodrun, or under torchrun without Horovod, on every rank; rank 0 prints a table of "
    "seconds and bytes a step."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add_model(parser, MODELS)
    add_optimizer(parser)
    add(
        "--methods",
        default=None,
        metavar="LIST",
        help=f"methods to time, with commas between them: {', '.join(KINDS)}; settings of TopKEF "
        f"as in {SHORTHAND}; other compressors as in Python, {CALL}; over torch DDP as in ddp+topk "
        f"(default: {DEFAULT}; under torchrun: {DEFAULT_OF_TORCHRUN}; with --script: "
        f"{DEFAULT_OF_SCRIPT})",
    )
    add(
        "--rounds",
        type=whole,
        default=5,
        metavar="STEPS",
        help="timed steps of each method, 1 or more (default: %(default)s)",
    )
    add(
        "--compute",
        default=None,
        metavar="KIND:SECONDS",
        help="simulated backward of each step: sleep:0.2 sleeps for 0.2 s, cpu:0.2 uses a core for "
        "0.2 s (default: none)",
    )
    add(
        "--idle-parameters",
        type=whole,
        default=0,
        metavar="COUNT",
        help="parameters without a gradient; not with powersgd (default: %(default)s)",
    )
    add(
        "--interface",
        default=None,
        metavar="NAME",
        help="network interface whose bytes are counted, such as eth0 (default: the one that "
        "horovodrun uses)",
    )
    add(
        "--rate",
        default=None,
        help="bandwidth of its link, for the picture, such as 1gbit (default: what the network "
        "card reports)",
    )
    add(
        "--script",
        type=Path,
        default=None,
        metavar="FILE",
        help="training script to time instead of a model's gradients; its own arguments follow "
        "after -- (default: none)",
    )
    add("arguments", nargs="*", help="arguments of the script")
    add(
        "--json",
        type=Path,
        default=None,
        metavar="FILE",
        help="write the results to this file (default: no file)",
    )
    add(
        "--picture",
        type=Path,
        default=None,
        metavar="FILE",
        help="draw time against bandwidth into this file, such as bench.png; needs matplotlib "
        "(default: no picture)",
    )
    add(
        "--beside",
        type=Path,
        nargs="*",
        default=[],
        metavar="FILE",
        help="earlier results of --json to draw in the same picture (default: none)",
    )


def main(args: argparse.Namespace) -> int:
    """Measure and report; return 2 if the options or this machine do not allow it."""
    try:
        specs, methods = specs_of(args.model), parse_methods(args.methods or _usual(args))
        compute = None if args.compute is None else Compute.of(args.compute)
        rate = given(bits_per_second, "--rate", args.rate)
        _check(args)
        _check_idle(args, methods)
        beside = [read_result(path) for path in args.beside] if prints() else []
        run = importlib.import_module("horovod_topk.cli.bench.run")  # loads PyTorch
        status: int = run.main(args, specs, methods, compute, rate, beside)
    except (ValueError, TopKError) as error:
        print(f"horovod-topk bench: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        cure = f"pip install {error.name}"
        if str(error.name).startswith("horovod"):
            cure = "torchrun starts ranks without Horovod; README.md says how to build Horovod"
        print(f"horovod-topk bench: {error}. {cure}", file=sys.stderr)
        return 2
    return status


def _usual(args: argparse.Namespace) -> str:
    """The default methods."""
    if args.script is not None:
        return DEFAULT_OF_SCRIPT
    usual = DEFAULT_OF_TORCHRUN if by_torchrun() else DEFAULT
    leave_out = args.idle_parameters or not is_installed("numpy")  # torch's needs NumPy
    return usual.replace("powersgd,", "") if leave_out else usual


def _check_idle(args: argparse.Namespace, methods: Sequence[Method]) -> None:
    """Refuse PowerSGD with idle parameters, as ranks start its collectives in different orders.

    PowerSGD's collectives start in callbacks, and DDP finds idle parameters by one more collective.
    Their order differs from rank to rank, and on Gloo ranks then abort.
    """
    if args.idle_parameters and any(method.kind == "powersgd" for method in methods):
        raise ValueError(
            f"--idle-parameters {args.idle_parameters} with powersgd: torch's ranks abort, as its "
            "collectives meet in different orders. Leave powersgd out of --methods"
        )


def _check(args: argparse.Namespace) -> None:
    if args.rounds < 1:
        raise ValueError(f"--rounds {args.rounds}: a median needs at least 1")
    check_whole("--rounds", args.rounds, 1, MOST_ROUNDS)
    check_whole("--idle-parameters", args.idle_parameters, 0, MOST_IDLE)
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
