"""What `mkdocs build` does to each page of docs before it renders it."""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]*\)")
FORMULAS = re.compile(r"^```text formulas: \w+$", re.M)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Name files outside of docs instead of linking to them; fences have a language alone."""
    return FORMULAS.sub("```text", OUTSIDE.sub(r"\1", markdown))
