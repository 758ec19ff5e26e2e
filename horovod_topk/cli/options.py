"""Options of several commands."""

from __future__ import annotations

import sys
from collections.abc import Callable

MANY = 64  # ranks


def given(read: Callable[[str], float], option: str, text: str | None) -> float | None:
    """What an option says; None where it was left out.

    Raises:
        ValueError: it cannot be read; names the option.
    """
    if text is None:
        return None
    try:
        return read(text)
    except ValueError as error:
        raise ValueError(f"{option} {error}") from error


def announce(ranks: int) -> None:
    """Tell whoever waits why: each owner's share is laid out by itself, for each kind of values."""
    if ranks > MANY:
        print(f"laying out the shares of {ranks:,} owners ...", file=sys.stderr)
