"""Lines of terminal output, within `WIDTH` columns."""

from __future__ import annotations

import textwrap

WIDTH = 100  # columns of a terminal that all output fits


def wrapped(text: str) -> str:
    """Wrap the sentences of a text. Rows of tables, which have two spaces in a row, stay whole."""
    return "\n".join(line if "  " in line.strip() else hanging(line) for line in text.split("\n"))


def hanging(text: str, head: str = "", indent: int = 2) -> str:
    """Wrap a sentence, with `head` before its first line and the others indented."""
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=head,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
