"""The command `horovod-topk`: it explains and measures; nothing in training depends on it."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from horovod_topk import __version__
from horovod_topk.cli import bench, doctor, plan
from horovod_topk.cli import bytes as traffic


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of its commands; the exit status."""
    parser = argparse.ArgumentParser(prog="horovod-topk", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    doctor.add_arguments(
        commands.add_parser("doctor", help="say what is there, what is amiss, and the cure")
    )
    traffic.add_arguments(
        commands.add_parser("bytes", help="say what each format and exchange sends")
    )
    bench.add_arguments(
        commands.add_parser("bench", help="time exchanges against each other, under horovodrun")
    )
    plan.add_arguments(
        commands.add_parser("plan", help="say what a step will take, and whether to compress")
    )
    args = parser.parse_args(arguments)
    mains = {
        "doctor": doctor.main,
        "bytes": traffic.main,
        "bench": bench.main,
        "plan": plan.main,
    }
    try:
        status = mains[args.command](args)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read it has what he wanted, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more
        return 128 + signal.SIGPIPE
    return status
