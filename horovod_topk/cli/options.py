"""Options that several commands share, and the types of options' values."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from horovod_topk.cli.models import MODELS
from horovod_topk.config import fields_of
from horovod_topk.core.run.substitute import Substitute
from horovod_topk.cost.machine import DEVICES
from horovod_topk.cost.quantities import bits_per_second, seconds
from horovod_topk.methods import METHODS, Method
from horovod_topk.methods.topk import TopK
from horovod_topk.ratios import DENSE, Rules, checked_rules
from horovod_topk.updates.tracker import Rule

MOST_RANKS = 16_384  # more than the largest jobs have
MOST_LOCAL = 128  # ranks of a node
SGD, ADAM = "sgd", "adam"
OPTIMIZERS = {SGD: "SGD with momentum", ADAM: "Adam or AdamW"}  # those whose steps TopKEF adapts
KINDS = dict(zip(DEVICES, ("CPU", "GPU"), strict=True))  # values of `--device`, as texts
PLAIN = "none"  # value of `--optimizer` for plain error feedback

_OPTION = re.compile(r"--[a-z][a-z-]*")
_NEGATIVE = re.compile(r"-[\d.]")
_OF_VALUE = re.compile(r"argument ([^:]+): (?=['\d.-]|nan|inf)")  # errors of `whole` and the like
Value = TypeVar("Value")


class Parser(argparse.ArgumentParser):
    """A parser whose errors are a ValueError of one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Raise the error, which names the option and its value, or where options are listed."""
        if found := _OF_VALUE.match(message):
            raise ValueError(f"{found[1]} {message[found.end() :]}")
        raise ValueError(f"{message}. `{self.prog} --help` lists the options")


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


# Types of values, for argparse


def quantity(read: Callable[[str], Value]) -> Callable[[str], Value]:
    """A type of option from a function that raises ValueError."""

    def parse(text: str) -> Value:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse


def whole(
    least: float = -math.inf, most: float = math.inf, unit: str = "", below: str = ""
) -> Callable[[str], int]:
    """Make an argparse type for a whole number within limits."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"{text!r} is not a whole number such as 8") from None
        if problem := outside(value, least, most, unit, below):
            raise ValueError(problem)
        return value

    return quantity(read)


def number(least: float = -math.inf, most: float = math.inf, wanted: str = "") -> Any:
    """A type of option: a number within limits, which `wanted` names."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"{text!r} is not a number such as 0.01") from None
        if wanted and not least <= value <= most:
            raise ValueError(f"{value:g}: give {wanted}")
        return value

    return quantity(read)


def outside(value: int, least: float, most: float, unit: str = "", below: str = "") -> str:
    """Return an error text if a value lies outside its limits, else an empty text.

    unit: what it counts, with a space before it; below: why a smaller number is refused.
    """
    text = str(value)
    shown = text if len(text) < 40 else f"{text[:20]}... ({len(text)} digits)"
    if value < least:
        return f"{shown}: give {least:,} or more{unit}{below}"
    return f"{shown}: give {most:,}{unit} at most" if value > most else ""


# Options

Options = Mapping[str, Mapping[str, Any]]  # arguments of `add_argument` by option
FLAG: Mapping[str, Any] = {"action": "store_true"}
FILE: Mapping[str, Any] = {"type": Path, "metavar": "FILE"}
RATE: Mapping[str, Any] = {"type": quantity(bits_per_second), "metavar": "RATE"}
TIME: Mapping[str, Any] = {"type": quantity(seconds), "metavar": "TIME"}
SHARED: Options = {
    "--model": {
        "default": "resnet50",
        "help": f"gradients' shapes: {', '.join(MODELS)}, or a JSON file such as "
        '{"weight": [300, 400], "bias": [400]} (default: %(default)s)',
    },
    "--device": {
        "choices": DEVICES,
        "default": "cpu",
        "help": "where the gradients are; payloads have the same bytes on both "
        "(default: %(default)s)",
    },
    "--ranks": {
        "type": whole(2, MOST_RANKS, below="; one rank exchanges nothing"),
        "default": 8,
        "help": "ranks, 2 or more (default: %(default)s)",
    },
    "--local-size": {
        "type": whole(1, MOST_LOCAL, " ranks a node"),
        "default": 1,
        "metavar": "RANKS",
        "help": "ranks on each node (default: %(default)s)",
    },
    "--ratio": {
        "type": number(),
        "default": TopK.ratio,
        "help": "share of each tensor's elements that a rank sends, above 0 and at most 1 "
        "(default: %(default)s)",
    },
    "--gather-ratio": {
        "type": number(),
        "metavar": "RATIO",
        "help": "exchange 'sharded': share of its elements that an owner sends to all ranks "
        "(default: the value of --ratio)",
    },
    "--min-numel": {
        "type": whole(),
        "default": TopK.min_numel,
        "metavar": "ELEMENTS",
        "help": "tensors with fewer elements are sent dense (default: %(default)s)",
    },
    "--ratios": {
        "nargs": "+",
        "default": (),
        "metavar": "PATTERN=RATIO",
        "help": "ratios for the tensors whose names match a pattern, as in 'head.*=dense'; the "
        "first match is used. The tensors of known models are named 0, 1, 2 and so on, from the "
        "input to the output (default: none)",
    },
    "--optimizer": {  # `optimizer_of` takes the parsed value
        "choices": (*OPTIMIZERS, PLAIN),
        "help": "optimizer of the training: TopKEF() adapts the steps of sgd (with momentum) and "
        f"adam (also AdamW); {PLAIN}: plain error feedback, as with momentum=0 and other "
        f"optimizers (default: {SGD})",
    },
    "--local-steps": {
        "type": whole(2, 2**20),
        "metavar": "STEPS",
        "help": "also say what it is when each rank trains alone for so many steps, with "
        "LocalSteps(every=STEPS), and then exchanges how far it has moved (default: not said)",
    },
    "--compressor": {  # `method_of` takes the parsed values
        "action": "append",
        "default": [],
        "metavar": "CALL",
        "help": "add a row for another compressor, such as 'QSGD(bits=2)' or PowerSGD; may be "
        "given several times (default: none)",
    },
}


def shared(*names: str) -> Options:
    """Options that several commands have."""
    return {name: SHARED[name] for name in names}


def add(parser: argparse.ArgumentParser, options: Options) -> None:
    """Add options; an option's flags have a space between them."""
    for flags, settings in options.items():
        parser.add_argument(*flags.split(), **settings)


def optimizer_of(asked: str | None) -> str | None:
    """The optimizer whose steps are adapted, a key of `OPTIMIZERS`; None: none."""
    return {None: SGD, PLAIN: None}.get(asked, asked)


def update_rule_of(optimizer: str | None) -> Rule | None:
    """What is kept and sent for the optimizer's steps."""
    return None if optimizer is None else Rule(optimizer)


def with_optimizer(optimizer: str | None) -> str:
    """The optimizer, as a part of a sentence."""
    return f"with {OPTIMIZERS[optimizer]}" if optimizer else "with plain error feedback"


def method_of(asked: Substitute) -> Method:
    """The method and settings of a compressor from `--compressor`."""
    if asked.is_horovods:
        raise ValueError(f"--compressor {asked}: the table has it, as allreduce")
    method = METHODS[asked.name]
    settings = {**method.for_training, **asked.settings}
    return method(**fields_of(method, settings, asked.name)[0])


def parse_ratios(given: Iterable[str]) -> Rules | None:
    """Parse values of `--ratios` to rules."""
    return checked_rules([_rule(text) for text in given])


def _rule(text: str) -> tuple[str, float | str]:
    pattern, equals, ratio = text.rpartition("=")
    try:
        if pattern and equals:
            return pattern, ratio if ratio == DENSE else float(ratio)
    except ValueError:
        pass
    raise ValueError(f"--ratios {text}: write PATTERN=RATIO, as in 'head.*=dense' or '*=0.1'")
