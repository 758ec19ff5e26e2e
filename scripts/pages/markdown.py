"""Markdown, and numbers as they stand in it."""

from __future__ import annotations

import math
import re
import statistics
import textwrap
from collections.abc import Iterable, Sequence

LEAST_FOR_ERROR = 3  # seeds; of fewer, every value is shown and no error


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; the first row of `rows` comes after the header."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def filled(prose: str) -> str:
    """Paragraphs and bullets with their lines broken anew, after figures have been put in."""
    return "\n\n".join(
        "\n".join(map(_fill, re.split(r"\n(?=- )", block))) for block in prose.split("\n\n")
    )


def _fill(block: str) -> str:
    indent = "  " * block.startswith("- ")
    words = " ".join(block.split())
    return textwrap.fill(words, 100, subsequent_indent=indent, break_on_hyphens=False)


def spread(values: Sequence[float], sign: str = "", unit: str = "") -> str:
    """Values, one a seed: each of one or two; of three or more, mean and its standard error.

    A standard error of two values says nothing: the values themselves stand there.
    """
    if len(values) < LEAST_FOR_ERROR:
        return ", ".join(f"{rounded(value):{sign}.2f}{unit}" for value in values)
    return f"{rounded(statistics.mean(values)):{sign}.2f} ± {standard_error(values):.2f}{unit}"


def standard_error(values: Sequence[float]) -> float:
    """The standard error of the mean of three values or more."""
    return statistics.stdev(values) / math.sqrt(len(values))


def rounded(value: float) -> float:
    """To two decimals, without a negative zero."""
    return round(value, 2) + 0.0
