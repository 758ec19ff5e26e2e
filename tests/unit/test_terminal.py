"""Terminal output fits 100 columns, and versions agree."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from horovod_topk import __version__, cli
from horovod_topk.cli.bench.table import aligned
from horovod_topk.cli.doctor import in_short
from horovod_topk.cli.doctor.finding import WIDTH as NAMES
from horovod_topk.cli.doctor.finding import Finding
from horovod_topk.cli.lines import WIDTH, wrapped

pytestmark = pytest.mark.tools

ROOT = Path(__file__).parents[2]
OWN = "TopKEF(ratio=0.01, values='int8', exchange='sharded')"
NODES = ("--ranks", "64", "--local-size", "8", "--optimizer", "none", "--local-steps", "30")
MORE = ("--compressor", OWN, "--model", "bert-base", *NODES)


def too_wide(text: str) -> list[str]:
    return [line for line in text.splitlines() if len(line) > WIDTH]


@pytest.mark.parametrize("command", ["", *cli.COMMANDS])
@pytest.mark.parametrize("columns", ["80", "100"])
def test_help_fits(
    command: str, columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit):
        cli.main([*command.split(), "--help"])
    shown = capsys.readouterr().out
    assert not [line for line in shown.splitlines() if len(line) > int(columns)]


@pytest.mark.parametrize(
    "words",
    [
        ("bytes",),
        ("bytes", *MORE),
        ("plan", "--compute", "62.5ms"),
        ("plan", "--compute", "62.5ms", "--device", "cuda", "--cores", "2", "--no-overlap", *MORE),
    ],
)
def test_tables_fit(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 0
    assert not too_wide(capsys.readouterr().out)


def test_columns_that_do_not_fit_follow_below() -> None:
    rows = [("", *(f"column {each}" for each in range(12))), ("name", *("1.5",) * 12)]
    lines = list(aligned(rows))
    assert not too_wide("\n".join(lines))
    assert "column 0" in lines[0]
    assert "column 11" not in lines[0]
    assert [line.split()[0] for line in lines if "1.5" in line] == ["name", "name"]
    assert sum(line.count("1.5") for line in lines) == 12


def test_sentences_are_wrapped_and_rows_are_not() -> None:
    sentence, row = "many words " * 20, "a table's row  " * 20
    assert not too_wide(wrapped(sentence))
    assert wrapped(sentence).split() == sentence.split()
    assert wrapped(row) == row


def test_findings_of_the_doctor_fit() -> None:
    lines = Finding("name", "what was found, " * 20, "what cures it, " * 20).lines()
    text = "\n".join(lines)
    assert not too_wide(text)
    assert f"\n{'':<{NAMES}}cure: what" in text


def test_the_doctor_says_whether_all_is_well() -> None:
    fine, note = Finding("a", "fine"), Finding("b", "loopback", "for several hosts: a network")
    assert in_short([fine, note]).found == "all is well on this host"
    assert in_short([fine, note, Finding("c", "bad", "mend it")]).found.endswith("cures of: c")


def test_make_help_fits() -> None:
    done = subprocess.run(["make", "-C", str(ROOT), "help"], capture_output=True, text=True)
    assert "make demo-ddp" in done.stdout
    assert not too_wide(done.stdout)


def test_the_demos_table_fits() -> None:
    pytest.importorskip("matplotlib")
    import demo

    sizes = dict.fromkeys(("sent_bytes", "dense_bytes"), 1_135_144)
    run = {"history": {"accuracy": [0.5, 0.98]}, "seconds_per_step": 0.024, **sizes}
    for launch in (demo.HOROVOD, demo.DDP):
        table = "\n".join(aligned([demo.COLUMNS, demo.row("TopKEF", run, launch)]))
        assert not too_wide(f"{table}\n{demo.NOTE.format(launch.last.format(demo.LINK))}")


@pytest.mark.parametrize(
    ("file", "where"),
    [("CITATION.cff", r"^version: (.+)$"), ("docker/mpijob.yaml", r"horovod-topk:([\d.]+)")],
)
def test_files_have_this_version(file: str, where: str) -> None:
    found = re.findall(where, (ROOT / file).read_text(encoding="utf-8"), re.M)
    assert {*found} == {__version__}


def test_the_changelog_has_this_version_first() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## \[(\d.+?)\]", text, re.M)[0] == __version__
