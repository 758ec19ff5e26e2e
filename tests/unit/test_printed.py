"""What pages show of commands is what the commands print."""

from __future__ import annotations

import ast
import html
import json
import re
import shlex
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import docs_site
import printed
from horovod_topk import cli
from horovod_topk.cli.options import Parser, add, behind_dashes, joined
from horovod_topk.cost.strategies import ADAPTED, CORRECTION

pytestmark = pytest.mark.tools


@pytest.mark.parametrize("page", printed.PAGES, ids=lambda page: page.name)
def test_outputs_are_those_of_now(page: Path) -> None:
    """`make printed` prints them anew."""
    text = page.read_text(encoding="utf-8")
    if any("compare" in found[1] for found in printed.blocks(text)):
        pytest.importorskip("scipy")
        pytest.importorskip("tqdm")
    assert printed.rewritten(text) == text


def test_another_output_would_be_noticed() -> None:
    page = (printed.ROOT / "docs/plan.md").read_text(encoding="utf-8")
    assert len(list(printed.blocks(page))) == 1
    changed = page.replace("step efficiency", "stop efficiency")
    assert changed != page
    assert printed.rewritten(changed) == page


def test_the_page_on_the_plan_has_the_constants_of_the_plan() -> None:
    """What `cost.strategies` adds for the optimizer's update, and for momentum correction."""
    page = " ".join((printed.ROOT / "docs/plan.md").read_text(encoding="utf-8").split())
    (_, sgd), (before, adam) = ADAPTED["sgd"], ADAPTED["adam"]
    assert ADAPTED["sgd"][0] == 0
    assert f"Momentum correction adds {CORRECTION} triads an element" in page
    assert f"The update of SGD adds {sgd} triads after receiving" in page
    assert f"that of Adam {before} before sending and {adam} after receiving" in page


def test_formulas_are_mathematics_on_the_site() -> None:
    page = (printed.ROOT / "docs/how-it-works.md").read_text(encoding="utf-8")
    lines = [line for _, text in printed.FORMULAS.findall(page) for line in text.splitlines()]
    for line in lines:
        ElementTree.fromstring(html.unescape(docs_site.mathml(line.split(maxsplit=1)[1])))
    assert "<mi>a</mi><mo>+</mo><mfrac><mrow><mi>b</mi>" in docs_site.mathml("a + b / c / (d - 1)")
    for wrong in ("a) + b", "(a + b"):
        with pytest.raises(ValueError, match=r"nothing opens|at the end"):
            docs_site.mathml(wrong)


def test_every_error_has_a_cause_and_a_cure() -> None:
    _, _, *rows = printed.error_rows()
    assert len(rows) == 20
    for row in rows:
        name, cause, cure = row.strip("| ").split(" | ")
        assert cause.endswith(".") and cure.endswith("."), name


def test_warnings_are_found_however_they_are_given() -> None:
    module = """
TEXT = "a text that has a name"
log.warning("%s has %d of %.3g", name, 2, 3.0)
log.warning("%s", TEXT)
self._warn(f"the {first} of {second!r} " "is gone")
def note(): return "TopKEF: it was there until " + what
log.info("this is said, and does not warn")
"""
    assert [*printed.warnings_of(ast.parse(module))] == [
        "a text that has a name",
        "the … of … is gone",
        "TopKEF: it was there until …",
    ]


COMMAND = re.compile(r"^\$ (?:[^\n]* )?horovod-topk ((?:[^\n]*\\\n)*[^\n]*)$", re.M)


def commands() -> list[list[str]]:
    texts = (page.read_text(encoding="utf-8") for page in printed.PAGES)
    found = [line.replace("\\\n", " ") for text in texts for line in COMMAND.findall(text)]
    return [shlex.split(line.partition(";")[0], comments=True) for line in found]


def test_commands_take_the_options_that_pages_give_them() -> None:
    assert len(commands()) > 12
    for name, *words in commands():
        parser = Parser()
        add(parser, cli.COMMANDS[name].OPTIONS)
        given = behind_dashes(words)[0] if name in cli.OF_SCRIPTS else words
        parser.parse_args(joined(given))


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[tuple[str, str], list[str]]:
    """The rows of `horovod-topk bytes`: exchange and values, then the figures."""
    assert cli.main(["bytes", *words]) == 0
    table, _, _ = capsys.readouterr().out.partition("\n\n")
    rows = (line.split() for line in table.partition("of fp16\n")[2].splitlines())
    return {(row[0], row[1]): row[2:] for row in rows}


CHOOSING = (printed.ROOT / "docs/choosing.md").read_text(encoding="utf-8")
ROW = re.compile(
    r"^\| (?:the default: )?(allgather|sharded), (\w+), ratio ([\d.]+) \| "
    r"([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$",
    re.M,
)


def test_reductions_are_those_of_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    rows = ROW.findall(CHOOSING)
    assert len(rows) == 6
    known: dict[Any, Any] = {}
    for exchange, values, ratio, *figures in rows:
        for ranks, figure in zip(("2", "4", "8", "64"), figures, strict=True):
            options = ("--ratio", ratio, "--ranks", ranks)
            if options not in known:
                known[options] = listed(capsys, *options)
            assert known[options][exchange, values][2] == f"{figure}x", (exchange, values, options)


def test_bytes_of_nodes_are_those_of_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    found = listed(capsys, "--ratio", "0.01", "--local-size", "4")
    rows = re.findall(
        r"^\| (\w+) \| (\w+) \| ([\d,]+) \| ([\d,]+) \| ([\d.]+x) \|$", CHOOSING, re.M
    )
    assert len(rows) == 8
    for exchange, values, *figures in rows:
        assert found[exchange, values][:3] == figures


def test_limits_are_those_of_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """Of docs/choosing.md: up to which bandwidth a ResNet-50 is compressed."""
    limits: dict[tuple[str, str], int] = {}
    for optimizer in ("sgd", "adam", "none"):
        words = ["--compute", "62.5ms", "--values", "int4", "--optimizer", optimizer, "--json"]
        assert cli.main(["plan", *words]) == 0
        for row in json.loads(capsys.readouterr().out)["strategies"][3:]:
            (span,) = row["faster"]
            limits[optimizer, row["exchange"]] = round(span["below"] / 1e9)
    gathered, owned = (
        [limits[o, e] for o in ("sgd", "adam", "none")] for e in ("allgather", "sharded")
    )
    text = " ".join(CHOOSING.split())
    assert f": {gathered[0]} Gbit/s for allgather and {owned[0]} for sharded with SGD" in text
    assert f", {gathered[1]} and {owned[1]} with `--optimizer adam`" in text
    assert f"and {gathered[2]} and {owned[2]} with `--optimizer none`" in text
