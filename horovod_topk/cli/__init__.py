"""The command `horovod-topk`. It explains and measures; training does not depend on it."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from horovod_topk import __version__
from horovod_topk.cli import bench, compare, doctor, plan, tune
from horovod_topk.cli import bytes as traffic
from horovod_topk.cli.options import Parser, add, behind_dashes, joined
from horovod_topk.errors import TopKError

DESCRIPTION = "Check, predict and measure gradient compression for Horovod."
COMMANDS = {
    "doctor": doctor,
    "bytes": traffic,
    "bench": bench,
    "plan": plan,
    "compare": compare,
    "tune": tune,
}
OF_SCRIPTS = ("compare", "tune")  # whose script has arguments of its own, after --
INSTALL = {  # cures for a missing module, by the beginning of its name
    "horovod": "torchrun starts ranks without Horovod; README.md says how to build Horovod",
    "": "pip install {}",
}
EXTRA = "Install it with pip install -e '.[{}]', from the project's checkout"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit status: 2 if its options or the machine forbid it.

    Such an error is one line on stderr.
    """
    given = joined(sys.argv[1:] if arguments is None else arguments)
    command = given[0] if given and given[0] in COMMANDS else ""
    try:
        args = _parsed(given)
        status: int = COMMANDS[args.command].main(args)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's last flush
        return 128 + signal.SIGPIPE
    except (ValueError, TopKError) as error:
        return _refused(command, str(error))
    except ModuleNotFoundError as error:
        missing = str(error.name)
        cure = next(cure for name, cure in INSTALL.items() if missing.startswith(name))
        cure = EXTRA.format(command) if command in OF_SCRIPTS else cure.format(missing)
        return _refused(command, f"{error}. {cure}")
    return status


def _parsed(given: list[str]) -> argparse.Namespace:
    parser = Parser(prog="horovod-topk", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, module in COMMANDS.items():
        described = module.DESCRIPTION
        own = commands.add_parser(name, help=described.partition(".")[0], description=described)
        add(own, module.OPTIONS)
    if given[:1] and given[0] in OF_SCRIPTS:
        given, of_script = behind_dashes(given)
        return parser.parse_args(given, argparse.Namespace(arguments=of_script))
    return parser.parse_args(given)


def _refused(command: str, error: str) -> int:
    print(f"{f'horovod-topk {command}'.rstrip()}: {error}", file=sys.stderr)
    return 2
