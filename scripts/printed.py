"""`make printed`: prints anew what pages show of commands whose output follows from the code alone.

These are the code blocks that begin with `$ horovod-topk plan` or `bytes`, or `compare` with
`--no-runs`, and have output; the blocks with formulas of `horovod_topk/updates/formulas.py`; and
the tables of errors and warnings, which follow a comment such as `<!-- printed: errors -->`.
`tests/unit/test_printed.py` compares; this script rewrites.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from horovod_topk import cli, errors
from horovod_topk.updates import formulas

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```console\n(\$ horovod-topk (?:[^\n]*\\\n)*[^\n]*\n)(.*?)^```$", re.M | re.S)
EXACT = ("plan", "bytes")
FORMULAS = re.compile(r"^```text formulas: (\w+)\n(.*?)^```$", re.M | re.S)
FUNCTION = re.compile(r'^def (\w+)\(.*?^    """(.*?)\.(?:"""|$)', re.M | re.S)
TABLE = re.compile(r"^<!-- printed: (\w+) -->\n\n(?:\|[^\n]*\n)*", re.M)
WARNERS = ("warning", "_warn", "_warned", "_say")  # functions that write a warning to the log


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
    """What `horovod-topk` prints, in the repository's root."""
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


def error_rows() -> Iterator[str]:
    """Yield a row for each error: its name, its cause and its cure, from its docstring."""
    yield from ("| error | cause | cure |", "| --- | --- | --- |")
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and errors.TopKError in kind.__mro__[1:]:
            cause, _, cure = " ".join((inspect.getdoc(kind) or "").split()).partition(" Cure: ")
            yield f"| `{name}` | {cause} | {cure} |"


def warning_rows() -> Iterator[str]:
    """Yield a row for each warning in the log: its text, with dots in place of values."""
    yield from ("| warning |", "| --- |")
    texts = set[str]()
    for path in sorted((ROOT / "horovod_topk").rglob("*.py")):
        texts |= set(warnings_of(ast.parse(path.read_text(encoding="utf-8"))))
    for text in sorted(texts):
        escaped = re.sub(r"([*_<|\[])", r"\\\1", text)
        yield f"| {escaped} |"


def warnings_of(module: ast.Module) -> Iterator[str]:
    """Yield the texts that a module gives to `WARNERS`, or returns for one of them."""
    named = {
        target.id: node.value
        for node in ast.walk(module)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(module):
        given: list[ast.expr] = []
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            given = node.args if name in WARNERS else []
        elif isinstance(node, ast.Return) and node.value:
            given = [node.value] if spoken(node.value).startswith("TopKEF: ") else []
        for each in given:
            text = spoken(named.get(each.id, each) if isinstance(each, ast.Name) else each)
            if len(re.findall(r"\w+", text)) > 3:
                yield text


def spoken(text: ast.expr) -> str:
    """Return a text of a module's source, with dots in place of values."""
    if isinstance(text, ast.Constant) and isinstance(text.value, str):
        return re.sub(r"%[.\d]*[a-z]", "…", text.value)
    if isinstance(text, ast.JoinedStr):
        return "".join(spoken(each) for each in text.values)
    if isinstance(text, ast.BinOp) and isinstance(text.op, ast.Add):
        return spoken(text.left) + spoken(text.right)
    return "…"


TABLES: Mapping[str, Callable[[], Iterator[str]]] = {
    "errors": error_rows,
    "warnings": warning_rows,
}


def rewritten(text: str) -> str:
    """A page with every such block as it is now."""
    text = TABLE.sub(lambda it: "\n".join([it[0].splitlines()[0], "", *TABLES[it[1]](), ""]), text)
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
