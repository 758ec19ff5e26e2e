"""Lists that are kept by hand have all that they are lists of."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from horovod_topk.core.run.base_compressor import BaseCompressor, Forwarded
from horovod_topk.core.run.stats import Stats, StepCounters
from horovod_topk.methods import METHODS

ROOT = Path(__file__).parents[2]


def test_help_has_every_target_of_make_and_contributing_names_no_other() -> None:
    makefile = (ROOT / "Makefile").read_text()
    helped = {*re.findall(r"^([a-z-]+):.*## ", makefile, re.M)}
    phony = re.search(r"^\.PHONY: (.*)", makefile, re.M)
    assert phony and helped == {*phony[1].split()}
    named = re.findall(r"`make ([a-z-]+)", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(named) > 3 and {*named} <= helped


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_compressors_document_every_setting(framework: str) -> None:
    pytest.importorskip(f"horovod.{framework}")
    adapter = importlib.import_module(f"horovod_topk.{framework}")
    for name in METHODS:
        compressor = getattr(adapter, name)
        text, settings = (
            inspect.getdoc(compressor) or "",
            {*inspect.signature(compressor).parameters},
        )
        assert settings == {*re.findall(r"^    (\w+): ", text, re.M)}


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_index_lists_every_page() -> None:
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    listed = re.findall(r"^\| \[([a-z-]+\.md)\]\(\1\) \|", _text(ROOT / "docs/README.md"), re.M)
    assert sorted(listed) == sorted(pages)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", _text(page)):
        if link.startswith("http"):
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link


def _anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", _text(page), re.M)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


def _text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


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
    assert len(found) > 12
    for page, command in found:
        monkeypatch.setattr("sys.argv", shlex.split(command, comments=True))
        assert runner.parse_args().command, (page, command)


def test_monitoring_page_names_every_statistic_and_method_of_the_state() -> None:
    page = _text(ROOT / "docs/monitoring.md")
    names = {field.name for kind in (Stats, StepCounters) for field in dataclasses.fields(kind)}
    names |= {name for name, each in vars(BaseCompressor).items() if isinstance(each, Forwarded)}
    missing = {name for name in names if not re.search(rf"`{name}[`(]", page)}
    assert not missing


def test_settings_page_names_every_setting() -> None:
    adapter = pytest.importorskip("horovod_topk.ddp")
    page = _text(ROOT / "docs/settings.md")
    settings = inspect.signature(adapter.TopKEF).parameters
    assert len(settings) == 15
    assert not {name for name in settings if f"| `{name}` |" not in page}


def names_of(source: str) -> set[str]:
    """Names that a module gives to functions, classes, arguments, fields and constants."""
    found = set[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id.isupper():
            found.add(node.id)
    return {name.lstrip("_") for name in found}


def test_words_that_the_architecture_replaces_are_gone() -> None:
    rows = re.findall(
        r"^\| [^|]+ \| [^|]+ \| (\w+) \|$", _text(ROOT / "docs/architecture.md"), re.M
    )
    assert {"leg", "is_over"} <= {*rows}
    assert names_of("def f(leg):\n  self._turn = LOSS = 1") >= {"f", "leg", "turn", "LOSS"}
    rooms = "core", "methods", "updates", "torch", "torch_training", "ddp", "tensorflow"
    paths = [path for room in rooms for path in (ROOT / "horovod_topk" / room).rglob("*.py")]
    found = {str(path): names_of(path.read_text()) & {*rows} for path in paths}
    assert {name: names for name, names in found.items() if names} == {}


def test_a_class_of_the_core_has_a_name_of_its_own() -> None:
    rooms = "core", "methods", "updates", "ops", "kernels", "torch_training"
    named: dict[str, list[str]] = {}
    for path in (each for room in rooms for each in (ROOT / "horovod_topk" / room).rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                named.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: files for name, files in named.items() if len(files) > 1} == {}


ENTRY = re.compile(r"^::: (\S+)\n(?:    options:(?: \{members: (\[.*?\]|false).*\})?\n)?", re.M)


def test_the_site_has_every_page() -> None:
    """`make docs` builds it, and adds the changelog."""
    listed = re.findall(r": (\S+\.(?:md|ipynb))$", (ROOT / "mkdocs.yml").read_text(), re.M)
    files = [each for kind in ("*.md", "*.ipynb") for each in (ROOT / "docs").rglob(kind)]
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in files]
    assert sorted(listed) == sorted([*pages, "changelog.md"])


def test_the_reference_has_a_docstring_for_all_that_it_shows() -> None:
    """The site would leave out members without one."""
    entries = ENTRY.findall(_text(ROOT / "docs/api.md"))
    assert len(entries) > 25
    without = [
        f"{name}{member and f'.{member}'}"
        for name, members in entries
        for member in ("", *_shown(name, members))
        if not _docstring(name, member)
    ]
    assert without == []


def _shown(name: str, members: str) -> list[str]:
    """Members that the site shows: those in the options, or all public ones."""
    if members:
        return [] if members == "false" else re.findall(r"\w+", members)
    body = getattr(_node(name), "body", [])
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return [each.name for each in body if isinstance(each, kinds) and each.name[0] != "_"]


def _docstring(name: str, member: str) -> str | None:
    """Docstring of a module, a class or a function, or of a member, which a base class may have."""
    node = _node(name)
    if not member:
        return ast.get_docstring(node)
    found = [each for each in node.body if getattr(each, "name", "") == member]
    if found:
        return ast.get_docstring(found[0])  # type: ignore[arg-type]
    bases = [ast.unparse(each).partition("[")[0] for each in getattr(node, "bases", [])]
    module = importlib.import_module(name.rpartition(".")[0]) if bases else None
    kinds = [getattr(module, each) for each in bases if "." not in each]
    return next(
        (text for kind in kinds if (text := inspect.getdoc(getattr(kind, member, None)))), None
    )


def _node(name: str) -> Any:
    """The syntax of a module, or of a class or function in one."""
    path = ROOT / name.replace(".", "/")
    for module in (path.with_suffix(".py"), path / "__init__.py"):
        if module.exists():
            return ast.parse(module.read_text())
    tree = _node(name.rpartition(".")[0])
    (found,) = [each for each in tree.body if getattr(each, "name", "") == path.name]
    return found
