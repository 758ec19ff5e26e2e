"""`make printed`: prints anew what pages show of commands whose output follows from the code alone.

These are the code blocks that begin with `$ horovod-topk plan` or `bytes`, or `compare` with
`--no-runs`, and have output; and the blocks with formulas of `horovod_topk/updates/formulas.py`.
`tests/unit/test_printed.py` compares; this script rewrites.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from horovod_topk import cli
from horovod_topk.updates import formulas

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```console\n(\$ horovod-topk (?:[^\n]*\\\n)*[^\n]*\n)(.*?)^```$", re.M | re.S)
EXACT = ("plan", "bytes")
FORMULAS = re.compile(r"^```text formulas: (\w+)\n(.*?)^```$", re.M | re.S)
FUNCTION = re.compile(r'^def (\w+)\(.*?^    """(.*?)\.(?:"""|$)', re.M | re.S)


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


def mathematics(part: str) -> str:
    """The formulas of a part of formulas.py, named by a comment: first lines of docstrings.

    Functions whose first line is no formula are left out.
    """
    source = inspect.getsource(formulas).partition(f"\n# {part}")[2].partition("\n# ")[0]
    found = [(name, line) for name, line in FUNCTION.findall(source) if re.search("[=<>^]", line)]
    width = max(len(name) for name, _ in found)
    return "".join(f"{name:{width}}   {line}\n" for name, line in found)


def rewritten(text: str) -> str:
    """A page with every such block as it is now."""
    text = FORMULAS.sub(lambda it: f"```text formulas: {it[1]}\n{mathematics(it[1])}```", text)
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
