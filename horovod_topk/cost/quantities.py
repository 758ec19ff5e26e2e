"""Parse and format bandwidths, times and counts."""

from __future__ import annotations

import math
import re
from typing import TypeGuard

RATES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
FASTEST, LONGEST = 1e15, 1e6  # bit/s, s
LARGEST = 1e100  # sums and squares of such numbers are finite


def bits_per_second(text: str) -> float:
    """Parse a bandwidth: "100mbit", "2.5gbit" and the like."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]?)bit", text.lower())
    if found is None or float(found[1]) == 0:
        raise ValueError(
            f"{text!r} is not a bandwidth: give a number above 0 with its unit, such as 100mbit, "
            "2.5gbit or 10gbit"
        )
    bandwidth = float(found[1]) * RATES[found[2]]
    if bandwidth < 1:
        raise ValueError(f"{shown(text)} is too slow: give 1bit (a second) or more")
    if bandwidth > FASTEST:
        raise ValueError(f"{shown(text)} is too fast: give 1,000 Tbit/s at most")
    return bandwidth


def seconds(text: str) -> float:
    """Parse a time: "62.5ms", "50us" and the like."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", text.lower())
    if found is None:
        raise ValueError(
            f"{text!r} is not a time: give a number of 0 or more with its unit, such as 62.5ms, "
            "50us or 1.2s"
        )
    time = float(found[1]) * TIMES[found[2]]
    if time > LONGEST:
        raise ValueError(f"{shown(text)} is too long: give 1,000,000 s at most")
    return time


def shown(text: str) -> str:
    """A value for an error, shortened if it is long."""
    return repr(text if len(text) < 40 else f"{text[:20]}...")


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value from a file is a number that can be computed with.

    No `bool`, which is an `int` to Python, and none beyond `LARGEST`.
    """
    return type(value) in (int, float) and -LARGEST <= value <= LARGEST  # type: ignore[operator]


def is_whole(value: object, least: int = 0, most: int = 2**53) -> TypeGuard[int]:
    """Whether a value from a file is a whole number within limits."""
    return type(value) is int and least <= value <= most


def count(number: int, noun: str) -> str:
    """Format a count: "1 node" or "1,000 nodes"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def milliseconds(seconds: float) -> str:
    """Format a time in milliseconds, to three digits."""
    if seconds <= 0:
        return "0"
    value = 1e3 * seconds
    return f"{value:.{min(6, max(0, 2 - math.floor(math.log10(value))))}f}"


def rate(bandwidth: float) -> str:
    """Format a bandwidth, to three digits."""
    for unit, size in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bandwidth >= size:
            return f"{bandwidth / size:.3g} {unit}"
    return f"{bandwidth / 1e3:.3g} kbit/s"
