"""The compression method of docs/adding-a-method.md, taken from that page and registered."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

from horovod_topk.methods import METHODS

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-method.md"
BLOCK = r"a whole codec, `horovod_topk/methods/(\w+)\.py`:\n\n```python\n(.*?)```"
LINE = r"is\n\n```python\n    \"(\w+)\": (\w+),\n```\n\nand makes"


def text() -> tuple[str, str]:
    """The method's module name and source, as the page has them."""
    found = re.search(BLOCK, PAGE.read_text(), re.S)
    assert found, "docs/adding-a-method.md has no worked example"
    return found[1], found[2]


def register(folder: Path) -> type[Any]:
    """Write the page's text to a file, import it, and add the page's line to the registry."""
    name, source = text()
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    line = re.search(LINE, PAGE.read_text())
    assert line, "docs/adding-a-method.md has no line for the registry"
    METHODS[line[1]] = getattr(module, line[2])
    return METHODS[line[1]]
