"""`horovod-topk bench`: steps of a model's gradients, exchanged in several ways in turn.

Every rank runs it, under `horovodrun`; rank 0 prints. Nothing here imports a framework before the
command runs.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from horovod_topk.cli.bench.compute import Compute
from horovod_topk.cli.bench.figures import read_result
from horovod_topk.cli.bench.methods import DEFAULT, DEFAULT_OF_SCRIPT, KINDS, Method, parse_methods
from horovod_topk.cli.files import check_picture, check_writable, prints
from horovod_topk.cli.models import MODELS, specs_of
from horovod_topk.cli.options import given
from horovod_topk.cost.quantities import bits_per_second
from horovod_topk.errors import TopKError

SHORTHAND = "topk-compact, topk-int8-sharded or topk:values=int8,exchange=sharded"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command."""
    add = parser.add_argument
    known = ", ".join(MODELS)
    add("--model", default="resnet50", help=f"{known}, or a JSON file with a shape for each name")
    add("--methods", default=None, help=f"of {', '.join(KINDS)}, ours as {SHORTHAND}")
    add("--rounds", type=int, default=5, help="timed steps of each (default: %(default)s)")
    add("--compute", default=None, help="backward takes sleep:SECONDS, or cpu:SECONDS of a core")
    add("--idle-parameters", type=int, default=0, help="have no gradient; not with powersgd")
    add("--interface", default=None, help="network card; default: the one horovodrun names")
    add("--rate", default=None, help="of its link, such as 1gbit; default: what the card says")
    add("--script", type=Path, default=None, help="time this instead, with its arguments behind --")
    add("arguments", nargs="*", help="of the script")
    add("--json", type=Path, default=None, help="write the results here")
    add("--picture", type=Path, default=None, help="draw time against bandwidth here")
    add("--beside", type=Path, nargs="*", default=[], help="draw these earlier results too")


def main(args: argparse.Namespace) -> int:
    """Measure and report; 2 if that cannot be."""
    try:
        specs, methods = specs_of(args.model), parse_methods(args.methods or _usual(args))
        compute = None if args.compute is None else Compute.of(args.compute)
        rate = given(bits_per_second, "--rate", args.rate)
        _check(args)
        _check_idle(args, methods)
        beside = [read_result(path) for path in args.beside] if prints() else []
        run = importlib.import_module("horovod_topk.cli.bench.run")  # loads PyTorch and Horovod
        status: int = run.main(args, specs, methods, compute, rate, beside)
    except (ValueError, TopKError) as error:
        print(f"horovod-topk bench: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        cure = "Install what is missing, as README.md says under Install"
        print(f"horovod-topk bench: {error}. {cure}", file=sys.stderr)
        return 2
    return status


def _usual(args: argparse.Namespace) -> str:
    """Methods if none are named."""
    if args.script is not None:
        return DEFAULT_OF_SCRIPT
    return DEFAULT.replace("powersgd,", "") if args.idle_parameters else DEFAULT


def _check_idle(args: argparse.Namespace, methods: Sequence[Method]) -> None:
    """PowerSGD's collectives start in callbacks, and DDP looks for idle parameters by one more.

    Which comes first differs from rank to rank, and on Gloo ranks then abort.
    """
    if args.idle_parameters and any(method.kind == "powersgd" for method in methods):
        raise ValueError(
            f"--idle-parameters {args.idle_parameters} with powersgd: torch's ranks abort, as its "
            "collectives meet in different orders. Leave powersgd out of --methods"
        )


def _check(args: argparse.Namespace) -> None:
    if args.rounds < 1:
        raise ValueError(f"--rounds {args.rounds}: a median needs at least 1")
    if args.idle_parameters < 0:
        raise ValueError(f"--idle-parameters {args.idle_parameters}: give 0 or more")
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
