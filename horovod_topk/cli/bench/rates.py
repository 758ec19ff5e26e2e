"""Bits a second, as people write them and as network cards say them."""

from __future__ import annotations

import re
from pathlib import Path

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


def bits_per_second(rate: str) -> int:
    """Of "100mbit", "1gbit" and the like.

    Raises:
        ValueError: it is no rate.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", rate.lower())
    if found is None:
        raise ValueError(f"{rate!r} is no rate: write 100mbit, 1gbit or 2.5gbit")
    return round(float(found[1]) * UNITS[found[2]])


def written(rate: float) -> str:
    """A rate for people to read."""
    for unit, name in ((10**9, "Gbit/s"), (10**6, "Mbit/s"), (10**3, "kbit/s")):
        if rate >= unit:
            return f"{rate / unit:g} {name}"
    return f"{rate:g} bit/s"


def rate_of_card(interface: str) -> int | None:
    """What a card says of its link; None where it says nothing, or is virtual and makes it up."""
    card = Path(f"/sys/class/net/{interface}")
    if not (card / "device").exists():
        return None
    try:
        megabits = int((card / "speed").read_text())
    except (OSError, ValueError):
        return None
    return megabits * 10**6 if megabits > 0 else None
