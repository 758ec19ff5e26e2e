"""`--ratios PATTERN=RATIO ...`: `TopKConfig.ratios` on a command line."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from horovod_topk.ratios import DENSE, Rules, checked_rules


def add_ratios(parser: argparse.ArgumentParser) -> None:
    """The option, of a command."""
    parser.add_argument(
        "--ratios",
        nargs="+",
        default=(),
        metavar="PATTERN=RATIO",
        help="of some tensors, as in 'head.*=dense'; the first that matches wins. Tensors of "
        "known models are called 0, 1, 2 and so on from the input",
    )


def parse_ratios(given: Iterable[str]) -> Rules | None:
    """What was given.

    Raises:
        ValueError: it has no ratio; ConfigError: TopKEF does not take it.
    """
    return checked_rules([_rule(text) for text in given])


def _rule(text: str) -> tuple[str, float | str]:
    pattern, equals, ratio = text.rpartition("=")
    try:
        if pattern and equals:
            return pattern, ratio if ratio == DENSE else float(ratio)
    except ValueError:
        pass
    raise ValueError(f"--ratios {text}: write PATTERN=RATIO, as in 'head.*=dense' or '*=0.1'")
