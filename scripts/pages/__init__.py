"""Pages of docs/ that are made from docs/results: a template NAME.md here, and figures to put in.

In a template `{{name}}` is replaced by the number, the table or the picture of that name,
`{{name:.1f}}` by the number in this format, and `{{name | argument | argument}}` by what the
function of that name returns for these arguments. Figures are those of the results that have the
page's name; those of other results have their name and a slash before them: `{{wire/reduced}}`.
Paragraphs with figures in them are wrapped anew. `python scripts/page.py NAME` writes every page
that shows these results.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pages.markdown import filled

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
RESULTS = DOCS / "results"
Values = Mapping[str, Any]  # texts, numbers, and functions that return text
REPORTS = {  # results of benchmarks -> the module whose `values` turns them into figures
    "benchmarks": "benchmarks.steps",
    "crashes": "benchmarks.crashes",
    "does-it-pay": "study.does_it_pay",
    "fsdp": "benchmarks.fsdp",
    "gpu": "benchmarks.gpu_compiled",
    "kernels": "benchmarks.kernels",
    "network": "benchmarks.network",
    "plan-grid": "benchmarks.plan_page",
    "readme": "front",
    "residuals": "benchmarks.residuals",
    "trouble": "benchmarks.trouble",
    "wire": "benchmarks.wire",
}
FIGURE = re.compile(r"\{\{(.*?)\}\}", re.S)


def write(name: str) -> None:
    """Write every page that shows these results."""
    for page in templates():
        if page == name or name in shown(page):
            place(page).write_text(text(page))
            print(f"written: {place(page).relative_to(ROOT)}")


def templates() -> Iterator[str]:
    """Yield the names of the pages that have a template."""
    return (path.stem for path in sorted(Path(__file__).parent.glob("*.md")))


def shown(page: str) -> set[str]:
    """Return the names of the other results whose figures a page shows."""
    return {*re.findall(r"\{\{\s*([\w-]+)/", template(page))}


def template(page: str) -> str:
    """Return the template of a page."""
    return Path(__file__).with_name(f"{page}.md").read_text()


def place(page: str) -> Path:
    """Where a page is."""
    return ROOT / "README.md" if page == "readme" else DOCS / f"{page}.md"


def text(page: str) -> str:
    """Return a page made from its template and the stored results, and draw its pictures."""
    return filled_in(template(page), Figures(page))


class Figures(Mapping[str, Any]):
    """Looks figures up: NAME in the page's own results, RESULTS/NAME in other results."""

    def __init__(self, page: str) -> None:
        self._page = page

    def __getitem__(self, name: str) -> Any:
        results, _, figure = name.rpartition("/")
        return figures(results or self._page)[figure]

    def __iter__(self) -> Iterator[str]:
        return iter(figures(self._page))

    def __len__(self) -> int:
        return len(figures(self._page))


@functools.cache
def figures(name: str) -> Values:
    """Return the figures of stored results, by name."""
    report = importlib.import_module(REPORTS.get(name, "study.page"))
    values: Values = report.values(getattr(report, "read", stored)(name))
    return values


def stored(name: str) -> Any:
    """Results of a benchmark, as it wrote them."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def filled_in(template: str, values: Values) -> str:
    """Put figures into a template."""

    def put(found: re.Match[str]) -> str:
        field, *arguments = " ".join(found[1].split()).split(" | ")
        name, _, form = field.partition(":")
        if name not in values:
            raise ValueError(f"{{{{{found[1]}}}}}: write one of {', '.join(values)}")
        value = values[name]
        return value(*arguments) if callable(value) else format(value, form)

    def block(text: str) -> str:
        is_prose = "{{" in text and not text.startswith(("{{", "|"))
        text = FIGURE.sub(put, text)
        return filled(text) if is_prose else text

    return "\n\n".join(map(block, template.split("\n\n"))).rstrip("\n") + "\n"
