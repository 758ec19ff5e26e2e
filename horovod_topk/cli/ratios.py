"""The option `--ratios PATTERN=RATIO ...`."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from horovod_topk.ratios import DENSE, Rules, checked_rules


def add_ratios(parser: argparse.ArgumentParser) -> None:
    """Add the option `--ratios`."""
    parser.add_argument(
        "--ratios",
        nargs="+",
        default=(),
        metavar="PATTERN=RATIO",
        help="ratios for the tensors whose names match a pattern, as in 'head.*=dense'; the first "
        "match is used. The tensors of known models are named 0, 1, 2 and so on, from the input "
        "to the output (default: none)",
    )


def parse_ratios(given: Iterable[str]) -> Rules | None:
    """Parse the option's values to rules.

    Raises:
        ValueError: a value is not PATTERN=RATIO.
        ConfigError: TopKEF does not accept a ratio.
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
