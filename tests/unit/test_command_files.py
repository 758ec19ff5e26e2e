"""Files that commands read: whatever stands in them, the answer is a result or one line."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("scipy")
pytest.importorskip("tqdm")

from horovod_topk import cli
from horovod_topk.cli.bench.figures import read_result
from horovod_topk.cli.compare.records import Point, Record, Store
from horovod_topk.cli.compare.settings import checked, of_file
from horovod_topk.cost import machine as machines
from horovod_topk.errors import TopKError

pytestmark = pytest.mark.tools

WRONG: list[Any] = [None, "x", [], [[]], {}, {"a": 1}, True, -1, 0, 1.5]
WRONG += [float("nan"), float("inf"), 1e300, 10**400]
Change = Callable[[Any], None]


def changes(found: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Copies of a JSON value of which one part is something else, or is missing."""
    parts = found.items() if isinstance(found, dict) else enumerate(found)
    for key, value in parts:
        if isinstance(value, dict | list):
            yield from (
                (f"{key}.{where}", {**found, key: each} if isinstance(found, dict) else [each])
                for where, each in changes(value)
            )
        for other in WRONG:
            changed = copy.copy(found)
            changed[key] = other
            yield f"{key}={other!r:.20}", changed
        if isinstance(found, dict):
            yield f"{key} missing", {name: each for name, each in found.items() if name != key}


def answered(words: list[str], capsys: pytest.CaptureFixture[str], where: str) -> None:
    status = cli.main(words)
    told = capsys.readouterr().err
    assert status == 0 or (status == 2 and told.count("\n") == 1), (where, told)


SCRIPT = "import horovod_topk"
SETTINGS = """script = "train.py"
compressors = {small = "TopKEF(ratio=0.01)"}
seeds = [0, 1]
"""


@pytest.fixture
def compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The records of a finished comparison of `SETTINGS`."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    Path("settings.toml").write_text(SETTINGS)
    (settings,) = map(checked, of_file(Path("settings.toml")))
    points = tuple(Point(step, 0.1 * step, {"loss": 1 / step}) for step in (1, 2, 3))
    records = [
        asdict(Record(cell, "done", "", points, 10.0, 100.0, 0.1, 1e6))
        for _, cell in settings.cells()
    ]
    return json.loads(json.dumps(records))  # type: ignore[no-any-return]


def test_runs_of_a_comparison(
    compared: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    first, *others = compared
    words = ["compare", "settings.toml", "--no-runs", "--out", "runs.jsonl", "--json", "found.json"]
    for where, changed in itertools.chain([("", first)], changes(first)):
        lines = [json.dumps(each) for each in (changed, *others)]
        Path("runs.jsonl").write_text("\n".join(lines) + "\n")
        answered(words, capsys, where)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "runs.jsonl, line 2 is no run of compare (Expecting property name"),
        ("[]", "line 2 is no run of compare (it is no object): remove it, so that the run is made"),
        ('{"cell": {}}', "line 2 is no run of compare (status is missing)"),
        ("[" * 100_000, "line 2 is no run of compare (maximum recursion depth exceeded"),
    ],
)
def test_lines_that_are_no_runs(
    compared: list[dict[str, Any]], line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("runs.jsonl").write_text(f"{json.dumps(compared[0])}\n{line}\n")
    words = ["compare", "settings.toml", "--no-runs", "--out", "runs.jsonl"]
    answered(words, capsys, line[:9])
    with pytest.raises(ValueError) as error:
        Store(Path("runs.jsonl"))
    assert message in str(error.value)


ANY = ["nan", "inf", "-1", "0", "1.5", "1" * 400, '"x"', "[]", "[[]]", "[1]", "{}", "{a = 1}"]
ANY += ["true", "2026-01-01", '[{a = "x"}]']
KEYS = ["script", "arguments", "compressors", "baselines", "seeds", "seed_argument", "options"]
KEYS += ["grid", "ranks", "hosts", "network", "controller", "limit_seconds", "metric", "target"]
KEYS += ["budget", "version", "simulated", "jobs", "title", "cases"]


@pytest.mark.parametrize("key", KEYS)
def test_settings_of_a_comparison(
    key: str, compared: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    kept = [line for line in SETTINGS.splitlines() if not line.startswith(key)]
    lines = [json.dumps(each) for each in compared]
    Path("runs.jsonl").write_text("\n".join(lines) + "\n")
    for value in ANY:
        Path("settings.toml").write_text("\n".join([*kept, f"{key} = {value}"]))
        words = ["compare", "settings.toml", "--no-runs", "--out", "runs.jsonl"]
        answered(words, capsys, f"{key} = {value}")


def test_constants_of_a_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, model = tmp_path / "machine.json", tmp_path / "model.json"
    model.write_text('{"w": [100, 100], "b": [100]}')
    good = json.loads(json.dumps(asdict(machines.read(machines.REFERENCE))))
    words = ["plan", "--compute", "1s", "--machine", str(path), "--model", str(model)]
    for where, changed in itertools.chain([("", good)], changes(good)):
        path.write_text(json.dumps(changed))
        answered([*words, "--values", "int4"], capsys, where)


def test_shapes_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.json"
    for where, changed in changes({"w": [100, 100], "b": [100]}):
        path.write_text(json.dumps(changed))
        answered(["plan", "--compute", "1s", "--model", str(path)], capsys, where)


def test_results_of_a_bench(tmp_path: Path) -> None:
    method = {"name": "none", "what": "", "settings": {}, "seconds": [0.1], "cpu": [0.1]}
    good = {
        "model": "resnet18",
        "ranks": 2,
        "hosts": 2,
        "compute": None,
        "rate": 10**9,
        "methods": [{**method, "bytes": 3.0}, {**method, "name": "dense", "bytes": 5.0}],
    }
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(good))
    read_result(path)
    draw = pytest.importorskip("horovod_topk.cli.bench.picture").draw
    pytest.importorskip("matplotlib")
    drawn, told = 0, []
    for where, changed in changes(good):
        path.write_text(json.dumps(changed))
        try:
            found = read_result(path)
        except (ValueError, TopKError) as error:
            told.append((where, str(error)))
            continue
        drawn += 1
        if drawn % 10 == 0:  # drawing takes long
            draw(tmp_path / "bench.png", [found])
    assert drawn
    for text in ("[" * 100_000, "[1]", "{}", '{"methods": []}', "no JSON", "\udcff"):
        path.write_text(text, errors="surrogateescape")
        with pytest.raises(ValueError, match="holds no results"):
            read_result(path)
    path.write_text(json.dumps({key: each for key, each in good.items() if key != "rate"}))
    with pytest.raises(ValueError, match="holds no results, as it lacks rate"):
        read_result(path)
    assert not [each for each in told if not each[1].startswith(f"--beside {path}")]
