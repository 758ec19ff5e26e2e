"""Options that several commands share."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable
from typing import NoReturn

from horovod_topk.config import split_deferred
from horovod_topk.core.substitute import Substitute
from horovod_topk.cost.machine import DEVICES
from horovod_topk.methods import METHODS, Method
from horovod_topk.methods.topk import TopK

MANY = 64  # ranks above which the bytes take long to compute

_OPTION = re.compile(r"--[a-z][a-z-]*")
_NEGATIVE = re.compile(r"-[\d.]")


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line on stderr, without the usage; exit status 2."""

    def error(self, message: str) -> NoReturn:
        """Print the error and end the process."""
        self.exit(2, f"{self.prog}: {message}. `{self.prog} --help` lists the options\n")


def joined(arguments: Iterable[str]) -> list[str]:
    """Join each option with a negative value that follows it: `--compute -5ms`.

    argparse would read such a value as another option, and report that the first one has no value.
    """
    found: list[str] = []
    for text in arguments:
        if _NEGATIVE.match(text) and "--" not in found and found and _OPTION.fullmatch(found[-1]):
            found[-1] += f"={text}"
        else:
            found.append(text)
    return found


def behind_dashes(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split a command line at the first `--`: the command's arguments, and the script's."""
    if "--" not in arguments:
        return arguments, []
    place = arguments.index("--")
    return arguments[:place], arguments[place + 1 :]


def whole(text: str) -> int:
    """Parse a whole number, for argparse.

    Raises:
        ArgumentTypeError: it is not one.
    """
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number such as 8") from None


def number(text: str) -> float:
    """Parse a number, for argparse.

    Raises:
        ArgumentTypeError: it is not one.
    """
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 0.01") from None


def given(read: Callable[[str], float], option: str, text: str | None) -> float | None:
    """Parse the value of an option; None if the option is missing.

    Raises:
        ValueError: the value is not valid; names the option.
    """
    if text is None:
        return None
    try:
        return read(text)
    except ValueError as error:
        raise ValueError(f"{option} {error}") from error


def add_model(parser: argparse.ArgumentParser, models: Iterable[str]) -> None:
    """Add the option `--model`."""
    parser.add_argument(
        "--model",
        default="resnet50",
        help=f"gradients' shapes: {', '.join(models)}, or a JSON file such as "
        '{"weight": [300, 400], "bias": [400]} (default: %(default)s)',
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add the option `--device`."""
    parser.add_argument(
        "--device",
        choices=DEVICES,
        default="cpu",
        help="where the gradients are; it decides the format of indices: packed on a CPU, plain "
        "(16 or 32 bits each) on a GPU (default: %(default)s)",
    )


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Add the options that select which elements are sent, except `--ratios`."""
    add = parser.add_argument
    add(
        "--ratio",
        type=number,
        default=TopK.ratio,
        help="share of each tensor's elements that a rank sends, above 0 and at most 1 "
        "(default: %(default)s)",
    )
    add(
        "--gather-ratio",
        type=number,
        default=None,
        metavar="RATIO",
        help="exchange 'sharded': share of its elements that an owner sends to all ranks "
        "(default: the value of --ratio)",
    )
    add(
        "--min-numel",
        type=whole,
        default=TopK.min_numel,
        metavar="ELEMENTS",
        help="tensors with fewer elements are sent dense (default: %(default)s)",
    )


def add_compressors(parser: argparse.ArgumentParser) -> None:
    """Add the option `--compressor`; `method_of` takes the parsed values."""
    parser.add_argument(
        "--compressor",
        action="append",
        default=[],
        metavar="CALL",
        help="add a row for another compressor, such as 'QSGD(bits=2)' or PowerSGD; may be given "
        "several times (default: none)",
    )


def method_of(asked: Substitute) -> Method:
    """The method and settings of a compressor from `--compressor`.

    Raises:
        ValueError: it is Horovod's own compression.
    """
    if asked.is_horovods:
        raise ValueError(f"--compressor {asked}: the table has it, as allreduce")
    method = METHODS[asked.name]
    settings, _ = split_deferred({**method.for_training, **asked.settings})
    return method(**settings)


def announce(ranks: int) -> None:
    """Print why the command takes long: it computes the payloads of each owner separately."""
    if ranks > MANY:
        print(f"computing the payloads of {ranks:,} owners ...", file=sys.stderr)
