"""Lists that are kept by hand have all that they are lists of."""

from __future__ import annotations

import importlib
import inspect
import re
import shlex
from pathlib import Path

import pytest

from horovod_topk.core.base_compressor import BaseCompressor

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
    settings = {*inspect.signature(BaseCompressor.__init__).parameters} - {"self", "unknown"}
    assert settings == {*re.findall(r"^    (\w+): ", text, re.M)}


LAUNCH = r"^(?:\$ |    )?(horovodrun (?:[^\n]*\\\n)*[^\n]*)"  # a line, or lines that go on
INLINE = r"`(horovodrun -[^`]*\.py[^`]*)`"


def launches() -> list[tuple[str, str]]:
    """Every whole command of the pages that begins with horovodrun, and where it is."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [
        (page.name, found.replace("\\\n", " "))
        for page in pages
        for pattern in (LAUNCH, INLINE)
        for found in re.findall(pattern, page.read_text(), re.M)
    ]


def test_horovodrun_takes_the_options_that_pages_give_it(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = pytest.importorskip("horovod.runner.launch")
    found = launches()
    assert len(found) > 15
    for page, command in found:
        monkeypatch.setattr("sys.argv", shlex.split(command, comments=True))
        assert runner.parse_args().command, (page, command)
