"""Reads Horovod's source and memory, for the tests that notice when it changes under a seam."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOROVOD = Path(importlib.util.find_spec("horovod").origin).parent


@dataclass(frozen=True)
class Function:
    """What is compared of a function."""

    signature: str
    digest: str  # of its lines without docstring, comment lines and blank lines
    lines: str


def functions(*files: str) -> dict[str, Function]:
    """Functions and methods of some source texts, by name."""
    found = {}
    for text in files:
        for name, node in _definitions(ast.parse(text)):
            found[name] = _function(text, node)
    return found


def _definitions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions outside of other functions, wherever an `if` may hold them."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _definitions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.If | ast.Try):
            yield from _definitions(node, prefix)


def _function(text: str, node: ast.FunctionDef) -> Function:
    """Works on lines and not on `ast.unparse`, whose output changes with Python's version."""
    lines = text.splitlines()
    numbers = set(range(node.lineno, node.end_lineno + 1))
    if ast.get_docstring(node) is not None:
        numbers -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    kept = [lines[number - 1].rstrip() for number in sorted(numbers)]
    body = "\n".join(line for line in kept if line and not line.lstrip().startswith("#"))
    digest = hashlib.sha256(body.encode()).hexdigest()[:16]
    return Function(ast.unparse(node.args), digest, body)


# Runs in a process of its own: prints what importing us changed in Horovod.
INSPECT = """
import importlib, json, sys
for name in sys.argv[2].split(","):
    importlib.import_module(name)

def contents():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "horovod":
            continue
        for key, value in vars(module).items():
            found[f"{name}.{key}"] = value
            if isinstance(value, type) and value.__module__ == name:
                found.update({f"{name}.{key}.{k}": v for k, v in vars(value).items()})
    return found

before = contents()
seam = importlib.import_module(sys.argv[1])
after = contents()
seam.install()
seam.install()
again = contents()

def differing(old, new):
    return sorted(k for k in old.keys() | new.keys() if old.get(k, 0) is not new.get(k, 0))

original, wrapped = before[sys.argv[3]], after[sys.argv[3]]
print(json.dumps({
    "checked": len(before),
    "import": differing(before, after),
    "install": differing(after, again),
    "unwraps": wrapped.__wrapped__ is original,
    "names": [wrapped.__name__, wrapped.__doc__ == original.__doc__],
}))
"""


def inspect_import(seam: str, wrapped: str, *modules: str) -> dict[str, Any]:
    """What importing a seam changes among the contents of Horovod's modules."""
    command = [sys.executable, "-c", INSPECT, seam, ",".join(modules), wrapped]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
