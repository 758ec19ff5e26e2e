"""`horovod-topk doctor`: what compression and Horovod find on this machine; each with a cure."""

from __future__ import annotations

import argparse
import itertools

from horovod_topk import __version__
from horovod_topk.cli.doctor import exchange, kernels, software, system
from horovod_topk.cli.doctor.finding import Finding


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command."""
    parser.add_argument(
        "--no-exchange", action="store_true", help="start no ranks: say what is there, and no more"
    )


def main(args: argparse.Namespace) -> int:
    """Print the findings; 1 if two ranks were to exchange and did not, or could not be started."""
    own = Finding("horovod_topk", __version__)
    build = software.find_build()
    listed = itertools.chain(software.findings(build), kernels.findings(), system.findings())
    for finding in itertools.chain([own], listed):
        _print(finding)
    if args.no_exchange:
        return 0
    last = exchange.meet(() if build is None else build.controllers)
    _print(last)
    return 1 if last.cure else 0


def _print(finding: Finding) -> None:
    print("\n".join(finding.lines()), flush=True)
