"""The command `horovod-topk`: it explains and measures; nothing in training depends on it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from horovod_topk import __version__
from horovod_topk.cli import bench, doctor
from horovod_topk.cli import bytes as traffic


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of its commands; the exit status."""
    parser = argparse.ArgumentParser(prog="horovod-topk", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    commands.add_parser("doctor", help="say which code compresses here, and why")
    traffic.add_arguments(
        commands.add_parser("bytes", help="say what each format and exchange sends")
    )
    bench.add_arguments(
        commands.add_parser("bench", help="time exchanges against each other, under horovodrun")
    )
    args = parser.parse_args(arguments)
    if args.command == "doctor":
        return doctor.main()
    return bench.main(args) if args.command == "bench" else traffic.main(args)
