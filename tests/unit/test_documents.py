"""Lists that are kept by hand have all that they are lists of."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

from horovod_topk.core.front import Front

ROOT = Path(__file__).parents[2]


def test_contributing_has_every_target_of_make() -> None:
    targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.M)
    assert len(targets) > 10
    listed = re.findall(r"^\| `make ([a-z-]+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    assert set(listed) == {*targets} - {"help"}


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_topkef_documents_every_setting(framework: str) -> None:
    pytest.importorskip(f"horovod.{framework}")
    text = inspect.getdoc(importlib.import_module(f"horovod_topk.{framework}").TopKEF) or ""
    settings = {*inspect.signature(Front.__init__).parameters} - {"self", "unknown"}
    assert settings == {*re.findall(r"^    (\w+): ", text, re.M)}
