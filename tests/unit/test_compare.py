"""`horovod-topk compare`: settings, curves, the rule of the verdict, and what is kept of runs."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("scipy")
pytest.importorskip("tqdm")

import compare_truth
from horovod_topk import cli, reporting
from horovod_topk.cli.compare import session
from horovod_topk.cli.compare.curves import Metric, at_step, at_time, reach
from horovod_topk.cli.compare.records import (
    DIVERGED,
    DONE,
    FAILED,
    LATE,
    Cell,
    Point,
    Record,
    Store,
)
from horovod_topk.cli.compare.run import Printed, command, record_of
from horovod_topk.cli.compare.settings import CompareSettings, checked, metric_of, named, of_file
from horovod_topk.cli.compare.uncertainty import BETTER, UNCLEAR, WORSE, difference
from horovod_topk.cli.compare.verdict import NOT, PAYS, judge, overall
from horovod_topk.cli.process import Ended, follow, rank_of
from horovod_topk.errors import TopKError

pytestmark = pytest.mark.tools

CUT, ACCURACY = Metric("loss", False), Metric("accuracy", True)
CURVE = [(10, 1.0, 3.0), (20, 2.0, 2.0), (30, 3.0, 2.5), (40, 4.0, 1.0)]


def test_curves_are_straight_between_reports() -> None:
    assert at_step(CURVE, 15) == 2.5
    assert at_step(CURVE, 41) is None
    assert (at_time(CURVE, 3.5), at_time(CURVE, 99), at_time(CURVE, 0.1)) == (1.75, 1.0, 3.0)
    assert reach(CURVE, 2.25, CUT) == (17.5, 1.75)
    assert reach(CURVE, 0.9, CUT) is None
    assert reach(CURVE, 2.9, ACCURACY) == (10.0, 1.0)
    assert at_step([(5, 1.0, 0.5)], 5) == 0.5


@pytest.mark.parametrize(
    ("asked", "reported", "better"),
    [
        (None, ["loss"], False),
        ("accuracy", ["accuracy", "loss"], True),
        ("val_loss", ["val_loss"], False),
        ("score:higher", ["score"], True),
        ("score:lower", ["score"], False),
    ],
)
def test_direction_of_a_metric(asked: str | None, reported: list[str], better: bool) -> None:
    assert metric_of(asked, reported).higher_is_better is better


@pytest.mark.parametrize("asked", [None, "score", "bleu", "loss:up"])
def test_a_metric_that_is_not_clear(asked: str | None) -> None:
    with pytest.raises(ValueError, match="--metric"):
        metric_of(asked, ["loss", "score"])


def test_compressors_have_names() -> None:
    found = named(["TopKEF(ratio=0.1)", "mine=TopKEF(values='int8')", "Dense(values='bfloat16')"])
    assert list(found) == ["TopKEF(ratio=0.1)", "mine", "Dense(values='bfloat16')"]
    assert found["mine"] == "TopKEF(values='int8')"
    with pytest.raises(ValueError, match="twice"):
        named(["TopKEF()", "TopKEF"])


CASES = """
script = "train.py"
options = { steps = 5 }
grid = { shards = ["equal", "skewed"], lr = [] }
[compressors]
"int4 a" = "TopKEF(values='int4')"
"int8 a" = "TopKEF(values='int8')"
"int8 b" = "TopKEF(values='int8', ratio=0.1)"
[[cases]]
options = { model = "gpt" }
grid = { lr = [0.1] }
compressors = ["int8 *", "int4 a"]
[[cases]]
title = "named"
grid = { lr = [0.2], shards = ["equal"] }
"""


def test_cases_complete_the_top_of_their_file(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(CASES)
    gpt, named = of_file(path)
    assert gpt.title == "gpt" and named.title == "named"
    assert list(gpt.compressors) == ["int8 a", "int8 b", "int4 a"]
    assert len(named.compressors) == 3
    assert gpt.variants() == [
        (("shards", "equal"), ("lr", 0.1)),
        (("shards", "skewed"), ("lr", 0.1)),
    ]
    assert named.variants() == [(("shards", "equal"), ("lr", 0.2))]
    assert dict(gpt.options) == {"steps": 5, "model": "gpt"}
    path.write_text(CASES.replace("int8 *", "int2 *"))
    with pytest.raises(ValueError, match=r"\['int2 \*'\]: the file has none of"):
        of_file(path)


def settings_in(folder: Path, text: str) -> CompareSettings:
    (folder / "train.py").write_text("print(1)")
    path = folder / "settings.toml"
    path.write_text('script = "train.py"\n' + text)
    (found,) = of_file(path)
    return checked(found)


GRID = """
arguments = ["--steps", 5]
seeds = 2
[compressors]
a = "TopKEF(ratio=0.1)"
[compressors.b]
method = "Dense"
values = "bfloat16"
[grid]
lr = [0.1, 0.2]
fast = [true, false]
"""


def test_a_file_of_settings_becomes_runs_by_turns(tmp_path: Path) -> None:
    found = settings_in(tmp_path, GRID)
    cells = list(found.cells())
    assert len(cells) == 2 * 4 * 4
    assert [name for name, _ in cells[:5]] == [
        "dense float32",
        "dense fp16",
        "a",
        "b",
        "dense float32",
    ]
    assert [cell.seed for _, cell in cells] == [0] * 16 + [1] * 16
    assert cells[3][1].compressor == "Dense(values='bfloat16')"
    assert cells[0][1].arguments == ("--steps", "5", "--lr", "0.1", "--fast")
    assert len({cell.digest for _, cell in cells}) == len(cells)


def test_runs_are_known_by_all_that_tells_them_apart(tmp_path: Path) -> None:
    first = settings_in(tmp_path, GRID)
    digests = {cell.digest for _, cell in first.cells()}
    assert digests == {cell.digest for _, cell in settings_in(tmp_path, GRID).cells()}
    for other in ("ranks = 3\n", 'network = "1gbit"\n', 'seed_argument = "--seed"\n'):
        assert not digests & {
            cell.digest for _, cell in settings_in(tmp_path, other + GRID).cells()
        }
    (tmp_path / "train.py").write_text("print(2)")
    (changed,) = of_file(tmp_path / "settings.toml")
    assert not digests & {cell.digest for _, cell in changed.cells()}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sede = 3", "Did you mean 'seed"),
        ("seeds = []\n[compressors]\na='TopKEF'", "seeds"),
        ("ranks = 1\n[compressors]\na='TopKEF'", "exchanges nothing"),
        ("simulated = true\nranks = 0\n[compressors]\na='TopKEF'", "--ranks 0"),
        ("[compressors]\na = 'LocalSteps(every=30)'", "Give --simulated"),
        ("simulated = true\n[compressors]\na = 'LocalSteps(evry=30)'", "no setting 'evry'"),
        ("[compressors]\na = 'TopK'", "there is no compressor"),
        ("[compressors]\na = 3", "a = 3"),
        ("[baselines]\nx = 'none'\ny = 'fp16'", "nothing to compare"),
        ("[compressors]\n'dense fp16' = 'TopKEF'", "Rename"),
        ("hosts='a:1,b:1'\nnetwork='1gbit'\n[compressors]\na='TopKEF'", "Give one"),
    ],
)
def test_a_file_that_cannot_be_compared(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises((ValueError, TopKError)) as error:
        settings_in(tmp_path, text)
    assert message in str(error.value)


def test_simulated_ranks_take_local_steps_and_may_be_one(tmp_path: Path) -> None:
    text = "simulated = true\nranks = 1\n[compressors]\na = \"LocalSteps('diloco', every=8)\""
    (call,) = settings_in(tmp_path, text).compressors.values()
    assert call.startswith("LocalSteps(Dense(), every=8, outer=Outer(lr=0.7, momentum=0.9")


def test_the_command_line_reaches_the_launcher(tmp_path: Path) -> None:
    settings = settings_in(tmp_path, 'seed_argument="--seed"\n' + GRID)
    cell = next(settings.cells())[1]
    words = command(settings, cell)
    arguments = ["--steps", "5", "--lr", "0.1", "--fast", "--seed", "0"]
    assert words[-8:] == [str(tmp_path / "train.py"), *arguments]
    assert "-np" in words and "--gloo" in words


def test_torchrun_starts_scripts_with_ddp(tmp_path: Path) -> None:
    cell = next((settings := settings_in(tmp_path, 'controller="torchrun"\n' + GRID)).cells())[1]
    words = command(settings, cell)
    assert words[1:5] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    assert words[5] == str(tmp_path / "train.py")
    with pytest.raises(ValueError, match="leave --hosts and --network out"):
        settings_in(tmp_path, 'controller="torchrun"\nnetwork="1gbit"\n' + GRID)


# Differences and verdicts


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ([1.0], UNCLEAR),
        ([1.0, 1.01], BETTER),
        ([-1.0, -1.01], WORSE),
        ([1.0, 5.0], UNCLEAR),
        ([1.0, 1.1, -0.01], UNCLEAR),
        ([1.0, 1.1, 0.9, 1.05, 0.95], BETTER),
        ([1.0, -1.1, 0.9, -1.05, 0.95], UNCLEAR),
        ([2.0, 2.0], UNCLEAR),
        ([2.0] * 6, BETTER),
        ([-2e-17] * 6, UNCLEAR),
        ([0.0, 0.0, 0.0, 0.0, 0.0], UNCLEAR),
    ],
)
def test_words_for_differences(values: list[float], word: str) -> None:
    assert difference(values).word == word


def records(level: float, pace: float, seeds: int = 5, **rest: Any) -> dict[int, Record]:
    """Runs whose loss ends near a level, with a pace in seconds a step."""
    found = {}
    for seed in range(seeds):
        wobble = 1 + 0.001 * ((seed * 7) % 5) * level * pace
        points = tuple(
            Point(s, s * pace * wobble, {"loss": level * wobble * (1 + 50 / s)})
            for s in range(10, 110, 10)
        )
        found[seed] = Record(Cell("", seed, (), (), ()), DONE, points=points, **rest)
    return found


def test_verdicts_on_plain_cases() -> None:
    baselines = {"float32": records(1.0, 1.0), "fp16": records(1.0, 0.9)}
    assert judge(records(1.001, 0.2), baselines, CUT).word in (PAYS, "faster, but ends worse")
    assert judge(records(0.9, 0.2), baselines, CUT).word == PAYS
    slow = judge(records(1.0, 2.0), baselines, CUT)
    assert slow.word == NOT and "float32 and fp16" in slow.because
    between = judge(records(1.0, 0.95), baselines, CUT)  # faster than float32, not than fp16
    assert between.word == NOT and between.because.endswith("fp16")
    assert overall({"a": slow, "b": between}) == "do not compress"
    pays = judge(records(0.9, 0.2), baselines, CUT)
    assert overall({"a": slow, "b": pays}) == "compress with b"


def test_runs_that_end_badly_are_told() -> None:
    baselines = {"float32": records(1.0, 1.0)}
    runs = records(1.0, 1.0)
    runs[3] = Record(runs[3].cell, FAILED, "exit status 1")
    assert judge(runs, baselines, CUT).word == FAILED
    runs[3] = Record(runs[3].cell, DONE, points=(Point(1, 1.0, {"loss": None}),))
    assert judge(runs, baselines, CUT).word == DIVERGED
    assert overall({"a": judge(runs, baselines, CUT)}) == "do not compress"
    assert judge(records(1.0, 1.0), {"float32": {}}, CUT).word == UNCLEAR


@pytest.mark.parametrize("truth", compare_truth.TRUTHS, ids=lambda truth: truth.name)
def test_verdicts_where_the_truth_is_known(truth: compare_truth.Truth) -> None:
    """Of 40 comparisons of five seeds; docs/compare.md has 400."""
    verdicts, qualities = compare_truth.words(truth, 5, 40)
    assert verdicts[truth.verdict] >= 30
    if truth.quality == UNCLEAR:
        assert qualities[UNCLEAR] >= 35


# Runs


def event(step: int, seconds: float, **metrics: float) -> dict[str, Any]:
    return {"event": "report", "step": step, "seconds": seconds, "metrics": metrics}


BEGUN = {"event": "compressor", "seconds": 100.0, "used": "none", "script": "TopKEF"}


def test_a_run_becomes_a_record(tmp_path: Path) -> None:
    settings = settings_in(tmp_path, GRID)
    cell = next(settings.cells())[1]
    totals = {"sent_bytes": 50, "dense_bytes": 500, "exchanges": 5, "waited": 1.0}
    events = [BEGUN, event(5, 101.0, loss=2.0), event(10, 103.0, loss=math.nan) | totals]
    found = record_of(settings, cell, Ended(0, False, ""), events, [])
    assert found.points == (Point(5, 1.0, {"loss": 2.0}), Point(10, 3.0, {"loss": None}))
    assert (found.sent_bytes, found.dense_bytes, found.waited) == (10, 100, 0.1)
    assert found.outcome("loss") == DIVERGED
    assert found.curve("loss") == [(5, 1.0, 2.0)]
    assert found.seconds_per_step == 0.4
    assert not found.seeded
    store = Store(tmp_path / "kept")
    assert store.find(cell) is None
    store.keep(found)
    assert store.find(cell) == found
    assert not list((tmp_path / "kept").glob("*.part"))


def test_why_a_run_is_none(tmp_path: Path) -> None:
    settings = settings_in(tmp_path, GRID)
    cell = next(settings.cells())[1]

    def found(ended: Ended, *events: Any) -> Record:
        return record_of(settings, cell, ended, events, [])

    report = event(1, 101.0, loss=1.0)
    assert found(Ended(0, False, ""), BEGUN, report).status == DONE
    assert "Pass compression=TopKEF" in found(Ended(0, False, ""), report).problem
    assert "horovod_topk.report" in found(Ended(0, False, ""), BEGUN).problem
    failed = found(Ended(1, False, "no such data"), BEGUN, report)
    assert failed.status == FAILED and "no such data" in failed.problem
    assert found(Ended(-15, True, ""), BEGUN, report).status == LATE


def test_printed_lines_are_reports_of_rank_0() -> None:
    printed = Printed()
    for line in (
        '[0]<stdout>:{"step": 3, "loss": 0.5, "note": "x"}\n',
        '[1]<stdout>:{"step": 3, "loss": 9}\n',
        '[1,0]<stdout>: {"step": 4, "loss": 0.25}\n',
        '{"loss": 1}\n',
        "{broken\n",
        "step 3\n",
    ):
        printed.line(line)
    assert [(e["step"], e["metrics"]) for e in printed.events] == [
        (3, {"loss": 0.5}),
        (4, {"loss": 0.25}),
    ]
    assert rank_of("[1,7]<stderr>:x") == 7 and rank_of("x") is None


def test_a_command_that_takes_too_long_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("horovod_topk.cli.process.GRACE_SECONDS", 0.1)
    seen = tmp_path / "seen"
    child = f"import time, pathlib; time.sleep(3); pathlib.Path({str(seen)!r}).touch()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    ended = follow([sys.executable, "-c", parent], limit_seconds=1.0)
    assert ended.late and ended.problem(1.0) == "took longer than 1 s"
    assert subprocess.run(["sleep", "3"]).returncode == 0
    assert not seen.exists()


# A whole comparison, with a stand-in for horovodrun


STAND_IN = """
import json, os, sys, time
step = 0.01 if "TopKEF" in os.environ["HOROVOD_TOPK_COMPRESSION"] else 0.03
seed = int(os.environ["HOROVOD_TOPK_SEED"])
with open(os.environ["HOROVOD_TOPK_REPORT"], "a") as file:
    def write(**event):
        file.write(json.dumps(event) + "\\n")
    write(event="compressor", seconds=0.0)
    write(event="seed", seconds=0.0)
    for n in range(1, 11):
        seconds, loss = n * step * (1 + seed * step), 1 / n + seed
        write(event="report", seconds=seconds, step=n, metrics={"loss": loss})
with open("runs.log", "a") as file:
    file.write("x")
sys.exit(os.environ["HOROVOD_TOPK_COMPRESSION"] == "TopKEF(ratio=0.5)")
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    script = tmp_path / "train.py"
    script.write_text(STAND_IN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "horovod_topk.cli.compare.run.command",
        lambda settings, cell: [sys.executable, str(settings.script), *cell.arguments],
    )
    return script


def compare(*words: str) -> int:
    return cli.main(["compare", *words])


def test_a_comparison_goes_on_and_never_repeats_a_run(
    stand_in: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    asked = [str(stand_in), "--compressors", "small=TopKEF(ratio=0.01)", "--seeds", "3"]
    assert compare(*asked, "--json", "out.json", "--picture", "out.png") == 0
    assert Path("runs.log").read_text() == "x" * 9
    found = json.loads(Path("out.json").read_text())
    assert found[0]["verdict"] == "compress with small"
    assert Path("out.png").stat().st_size > 10_000
    next(Path("compare-train").glob("*.json")).unlink()
    assert compare(*asked) == 0
    assert Path("runs.log").read_text() == "x" * 10
    assert compare(*asked, "--no-runs") == 0
    assert compare(*asked[:-1], "4") == 0
    assert Path("runs.log").read_text() == "x" * 13
    printed = capsys.readouterr().out
    assert "small: pays" in printed and "Verdict: compress with small" in printed


def test_a_run_that_fails_is_a_row(stand_in: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [str(stand_in), "--compressors", "TopKEF(ratio=0.5)", "--seeds", "2"]
    assert compare(*asked) == 0
    assert "TopKEF(ratio=0.5): failed (with seed 0, 1)" in capsys.readouterr().out
    assert compare(*asked) == 0
    assert Path("runs.log").read_text() == "x" * 6
    assert compare(*asked, "--retry") == 0
    assert Path("runs.log").read_text() == "x" * 8


def test_nothing_is_run_after_a_first_run_that_failed(
    stand_in: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in.write_text("print('no data here'); raise SystemExit(3)")
    assert compare(str(stand_in), "--compressors", "TopKEF") == 1
    shown = capsys.readouterr().err
    assert "exit status 3" in shown and "no data here" in shown
    assert len(list(Path("compare-train").glob("*.json"))) == 1


def test_two_comparisons_do_not_share_a_folder(tmp_path: Path) -> None:
    with session.alone(tmp_path):  # noqa: SIM117
        with pytest.raises(ValueError, match="another comparison runs"), session.alone(tmp_path):
            pass


def test_comparisons_take_turns(tmp_path: Path) -> None:
    """So that those who stop early have some of each."""
    both = [
        CompareSettings(
            script=tmp_path / name,
            version="1",
            compressors={"ours": "TopKEF()"},
            baselines={"d": "none"},
        )
        for name in ("one.py", "two.py")
    ]
    both[1] = dataclasses.replace(both[1], grid={"lr": (1, 2)})
    order = [(s.script.name, dict(c.grid).get("lr"), c.seed) for _, c, s in session.by_turns(both)]
    assert order[::2] == order[1::2]  # dense and ours in turn
    assert order[:8:2] == [
        ("one.py", None, 0),
        ("two.py", 1, 0),
        ("one.py", None, 1),
        ("two.py", 2, 0),
    ]
    assert len({*order}) == len(order) // 2 == 15


# report() and seed()


@pytest.fixture
def reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "events"
    monkeypatch.setenv(reporting.REPORT, str(path))
    for name in reporting.RANKS:
        monkeypatch.delenv(name, raising=False)
    reporting._file.cache_clear()
    reporting.note.cache_clear()
    yield path
    reporting._file.cache_clear()
    reporting.note.cache_clear()


def test_rank_0_writes_lines(reported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(reporting.SEED, "7")
    monkeypatch.setenv("HOROVOD_RANK", "0")
    assert reporting.seed(3) == 7 == reporting.seed()
    reporting.report(step=1, loss=0.5)
    with pytest.raises(ValueError, match="no metric"):
        reporting.report(step=2)
    lines = [json.loads(line) for line in reported.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["seed", "report"]
    assert lines[1]["metrics"] == {"loss": 0.5} and lines[1]["peak_memory"] > 1e6


def test_other_ranks_write_nothing(reported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_RANK", "1")
    reporting.report(step=1, loss=0.5)
    assert not reported.exists()


def test_outside_of_a_comparison_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(reporting.REPORT, raising=False)
    monkeypatch.delenv(reporting.SEED, raising=False)
    reporting._file.cache_clear()
    reporting.report(step=1, loss=object())  # type: ignore[arg-type]  # it is not even looked at
    assert reporting.seed(3) == 3
