"""Options that several commands share."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Iterable
from typing import NoReturn

from horovod_topk.config import fields_of
from horovod_topk.core.run.substitute import Substitute
from horovod_topk.cost.machine import DEVICES
from horovod_topk.methods import METHODS, Method
from horovod_topk.methods.topk import TopK
from horovod_topk.updates.tracker import Rule

MOST_RANKS = 16_384  # more than the largest jobs have
MOST_LOCAL = 128  # ranks of a node
SGD, ADAM = "sgd", "adam"
OPTIMIZERS = {SGD: "SGD with momentum", ADAM: "Adam or AdamW"}  # those whose steps TopKEF adapts
PLAIN = "none"  # value of `--optimizer` for plain error feedback

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


def add_optimizer(parser: argparse.ArgumentParser) -> None:
    """Add the option `--optimizer`; `optimizer_of` takes the parsed value."""
    parser.add_argument(
        "--optimizer",
        choices=(*OPTIMIZERS, PLAIN),
        help="optimizer of the training: TopKEF() adapts the steps of sgd (with momentum) and adam "
        f"(also AdamW); {PLAIN}: plain error feedback, as with momentum=0 and other optimizers "
        f"(default: {SGD})",
    )


def optimizer_of(asked: str | None) -> str | None:
    """The optimizer whose steps are adapted, a key of `OPTIMIZERS`; None: none."""
    return {None: SGD, PLAIN: None}.get(asked, asked)


def follows_of(optimizer: str | None) -> Rule | None:
    """What is kept and sent for the optimizer's steps."""
    return None if optimizer is None else Rule(optimizer)


def with_optimizer(optimizer: str | None) -> str:
    """The optimizer, as a part of a sentence."""
    return f"with {OPTIMIZERS[optimizer]}" if optimizer else "with plain error feedback"


def check_ranks(ranks: int, local_size: int) -> None:
    """Check the options `--ranks` and `--local-size`.

    Raises:
        ValueError: there are too few or too many.
    """
    if ranks < 2:
        raise ValueError(f"--ranks {ranks}: give 2 or more; one rank exchanges nothing")
    check_whole("--ranks", ranks, 2, MOST_RANKS)
    check_whole("--local-size", local_size, 1, MOST_LOCAL, " ranks a node")


def check_whole(option: str, value: int, least: int, most: int, unit: str = "") -> None:
    """Check that an option's whole number lies within limits.

    Raises:
        ValueError: it does not; names the option, the value and the limit.
    """
    if value < least:
        raise ValueError(f"{option} {_short(value)}: give {least:,} or more{unit}")
    if value > most:
        raise ValueError(f"{option} {_short(value)}: give {most:,}{unit} at most")


def check_positive(option: str, value: float | None, most: float = math.inf) -> None:
    """Check that an option's number, if given, is finite, above 0 and not above a limit.

    Raises:
        ValueError: it is not; names the option, the value and the limit.
    """
    if value is not None and not (0 < value <= most and math.isfinite(value)):
        limit = "" if math.isinf(most) else f" and {most:,.0f} at most"
        raise ValueError(f"{option} {value:g}: give a number above 0{limit}")


def _short(value: int) -> str:
    text = str(value)
    return text if len(text) < 40 else f"{text[:20]}... ({len(text)} digits)"


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
    settings = {**method.for_training, **asked.settings}
    return method(**fields_of(method, settings, asked.name)[0])
