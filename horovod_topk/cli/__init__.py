"""The command `horovod-topk`. It explains and measures; training does not depend on it."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from horovod_topk import __version__
from horovod_topk.cli import bench, compare, doctor, plan
from horovod_topk.cli import bytes as traffic
from horovod_topk.cli.options import Parser, behind_dashes, joined

DESCRIPTION = "Check, predict and measure gradient compression for Horovod."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the commands; return the exit status."""
    parser = Parser(prog="horovod-topk", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, module in COMMANDS.items():
        described = module.DESCRIPTION
        own = commands.add_parser(name, help=described.partition(".")[0], description=described)
        module.add_arguments(own)
    given = joined(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["compare"]:
        given, of_script = behind_dashes(given)
        args = parser.parse_args(given, argparse.Namespace(arguments=of_script))
    else:
        args = parser.parse_args(given)
    try:
        status: int = COMMANDS[args.command].main(args)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's last flush
        return 128 + signal.SIGPIPE
    return status


COMMANDS = {"doctor": doctor, "bytes": traffic, "bench": bench, "plan": plan, "compare": compare}
