"""Pages of docs/ that are made from docs/results: a template NAME.md here, and figures to put in.

In a template `{{name}}` is replaced by the number, the table or the picture of that name,
`{{name:.1f}}` by the number in this format, and `{{name | argument | argument}}` by what the
function of that name returns for these arguments.
Paragraphs with figures in them are wrapped anew. `python scripts/page.py NAME` writes docs/NAME.md.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pages.markdown import filled

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
RESULTS = DOCS / "results"
Values = Mapping[str, Any]  # texts, numbers, and functions that return text
REPORTS = {  # the pages of benchmarks -> the module whose `values` turns results into figures
    "benchmarks": "benchmarks.steps",
    "crashes": "benchmarks.crashes_page",
    "fsdp": "benchmarks.fsdp",
    "kernels": "benchmarks.kernels_page",
    "network": "benchmarks.network_page",
    "plan-grid": "benchmarks.plan_page",
    "readme": "front",
    "residuals": "benchmarks.residuals_page",
    "trouble": "benchmarks.trouble_page",
    "wire": "benchmarks.wire_page",
}
FIGURE = re.compile(r"\{\{(.*?)\}\}", re.S)


def write(name: str) -> Path:
    """Write a page."""
    path = place(name)
    path.write_text(text(name))
    return path


def place(name: str) -> Path:
    """Where a page is."""
    return ROOT / "README.md" if name == "readme" else DOCS / f"{name}.md"


def text(name: str) -> str:
    """Return a page made from its template and the stored results, and draw its pictures."""
    report = importlib.import_module(REPORTS.get(name, "study.page"))
    read = getattr(report, "read", stored)  # results of studies are runs
    return made(name, report.values(read(name)))


def stored(name: str) -> Any:
    """Results of a benchmark, as it wrote them."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def made(name: str, values: Values) -> str:
    """A page with figures in its template."""
    return filled_in(Path(__file__).with_name(f"{name}.md").read_text(), values)


def filled_in(template: str, values: Values) -> str:
    """Put figures into a template.

    Raises:
        ValueError: the template names a figure that does not exist.
    """

    def put(found: re.Match[str]) -> str:
        field, *arguments = " ".join(found[1].split()).split(" | ")
        name, _, form = field.partition(":")
        if name not in values:
            raise ValueError(f"{{{{{found[1]}}}}}: write one of {', '.join(values)}")
        value = values[name]
        return value(*arguments) if callable(value) else format(value, form)

    def block(text: str) -> str:
        is_prose = "{{" in text and not text.startswith("{{")
        text = FIGURE.sub(put, text)
        return filled(text) if is_prose else text

    return "\n\n".join(map(block, template.split("\n\n"))).rstrip("\n") + "\n"
