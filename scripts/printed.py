"""`make docs`: prints anew what pages show of commands whose output follows from the code alone.

These are the code blocks that begin with `$ horovod-topk plan` or `bytes`, or `compare` with
`--no-runs`, and have output. `tests/unit/test_printed.py` compares; this script rewrites.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from horovod_topk import cli

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```console\n(\$ horovod-topk (?:[^\n]*\\\n)*[^\n]*\n)(.*?)^```$", re.M | re.S)
EXACT = ("plan", "bytes")


def blocks(text: str) -> Iterator[re.Match[str]]:
    """The blocks of a page with a command that can be repeated, and with its output."""
    for found in BLOCK.finditer(text):
        words = command(found[1])
        exact = words[0] in EXACT or (words[0] == "compare" and "--no-runs" in words)
        if exact and found[2] and not found[2].startswith("$ "):
            yield found


def command(line: str) -> list[str]:
    """The arguments of `horovod-topk` in a line, which may go on after backslashes."""
    return shlex.split(line.removeprefix("$ horovod-topk ").replace("\\\n", " "))


def output(words: list[str]) -> str:
    """What `horovod-topk` prints, in the repository's root.

    Raises:
        RuntimeError: it failed.
    """
    printed = io.StringIO()
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(printed):
        status = cli.main(words)
    if status:
        raise RuntimeError(f"horovod-topk {shlex.join(words)}: exit status {status}")
    return "\n".join(line.rstrip() for line in printed.getvalue().splitlines()) + "\n"


def rewritten(text: str) -> str:
    """A page with every such block's output as it is now."""
    parts, end = [], 0
    for found in blocks(text):
        parts += [text[end : found.start(2)], output(command(found[1]))]
        end = found.end(2)
    return "".join([*parts, text[end:]])


def main() -> int:
    """Rewrite the pages, and name those that have changed."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        changed = rewritten(text)
        if changed != text:
            page.write_text(changed, encoding="utf-8")
            print(page.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
