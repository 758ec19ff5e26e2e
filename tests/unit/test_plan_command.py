"""`horovod-topk plan` on the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from horovod_topk import cli
from horovod_topk.cli import frameworks
from horovod_topk.cli.plan import arguments, kernels, measure
from horovod_topk.config import TopKConfig
from horovod_topk.core.nodes import Nodes
from horovod_topk.cost import machine as machines
from horovod_topk.methods.topk import VALUES

SEED = ["plan", "--model", "resnet18", "--compute", "62.5ms", "--bandwidth", "10gbit"]


def found(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.main([*SEED, "--json", *arguments]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(SEED) == 0
    text = capsys.readouterr().out
    head, *_, verdict = text.splitlines()
    assert head.startswith("resnet18: 11,689,512 float32 in 62 tensors, 8 ranks on 8 nodes")
    assert verdict.startswith(("compress: ", "do not compress: "))
    for way in ("allreduce     float16", "PowerSGD      rank 4", "sharded       int4"):
        assert way in text
    assert "constants: " in text
    assert "hierarchical" not in text


@pytest.mark.parametrize("local_size", [1, 3, 4])
def test_bytes_are_those_of_the_command_bytes(
    local_size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    size = ["--local-size", str(local_size)]
    assert cli.main(["bytes", "--model", "resnet18", *size]) == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    listed = {
        (e, v): (int(sent.replace(",", "")), int(left.replace(",", "")))
        for e, v, sent, left, *_ in table
    }
    ways = found(capsys, *size)["ways"]
    planned = {
        (way["exchange"], way["values"]): (way["sent_bytes"], way["node_bytes"])
        for way in ways
        if way["exchange"] != "PowerSGD"
    }
    # of the rank with most of them; of dense, the whole model's
    assert planned == listed
    assert len(ways) == 3 + len(VALUES) * (2 if local_size == 1 else 3)


def test_json_agrees_with_itself(capsys: pytest.CaptureFixture[str]) -> None:
    answer = found(capsys, "--values", "float32", "int8", "--latency", "50us", "--no-overlap")
    assert (answer["ranks"], answer["nodes"], answer["overlap"]) == (8, 8, False)
    assert answer["machine"]["network"]["bandwidth"] == 1e10
    assert answer["machine"]["network"]["latency"] == pytest.approx(5e-5)
    dense, *_ = answer["ways"]
    alone = dense["alone"]
    assert alone["seconds"] == pytest.approx(0.0625 + alone["exchange"])
    assert alone["efficiency"] == pytest.approx(0.0625 / alone["seconds"])
    fastest = min(
        way["alone"]["seconds"] for way in answer["ways"] if way["exchange"] in "allgather sharded"
    )
    assert answer["compress"] == (fastest < alone["seconds"])


def test_it_may_pay_on_fast_networks_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cnn.json"
    path.write_text('{"c1": [32, 1, 3, 3], "b1": [32], "fc": [10, 1152], "fb": [10]}')
    arguments = ["--model", str(path), "--compute", "5ms", "--ratio", "0.3", "--values", "float32"]
    answer = found(capsys, *arguments, "--bandwidth", "40gbit")
    (gathered,) = (way for way in answer["ways"] if way["exchange"] == "allgather")
    ((above, below),) = (span.values() for span in gathered["faster"])
    assert 1e8 < above < 4e10
    assert below is None
    assert "and pays above " in answer["verdict"]


def test_given_constants_take_the_place_of_measured_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = found(capsys)["machine"]
    path = tmp_path / "machine.json"
    kept["kernels"] = dict.fromkeys(kept["kernels"], 0.0)
    kept |= {"cores": 2.0, "origin": "a test"}
    path.write_text(json.dumps(kept))
    answer = found(
        capsys, "--machine", str(path), "--bandwidth", "1gbit", "--crowd", "8", "--cores", "4"
    )
    assert answer["machine"]["origin"] == "a test"
    assert answer["machine"]["network"]["bandwidth"] == 1e9
    assert (answer["machine"]["cores"], answer["machine"]["crowd"]) == (4.0, 8)
    assert all(way["alone"]["kernels"] == 0 for way in answer["ways"])


def test_do_not_compress_on_one_fast_node(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--ranks", "2", "--local-size", "2", "--local-bandwidth", "10tbit"]
    assert cli.main([*SEED, "--latency", "1us", *arguments]) == 0
    verdict = capsys.readouterr().out.splitlines()[-1]
    assert verdict.startswith("do not compress: dense takes ")


def test_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    assert cli.main([*SEED, "--picture", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert cli.main([*SEED, "--picture", str(tmp_path / "absent" / "plan.png")]) == 2
    assert "--picture" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["plan.foo", "plan"])
def test_a_picture_of_no_kind(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / name
    assert cli.main([*SEED, "--picture", str(path)]) == 2
    captured = capsys.readouterr()
    assert f"--picture {path}: end its name in one of " in captured.err
    assert "png" in captured.err
    assert not captured.out


def test_momentum_correction_takes_time_and_no_process_sets(
    capsys: pytest.CaptureFixture[str],
) -> None:
    nodes = ("--ranks", "8", "--local-size", "4", "--values", "int4")
    plain, corrected = found(capsys, *nodes), found(capsys, *nodes, "--momentum")
    assert {way["exchange"] for way in plain["ways"]} - {
        way["exchange"] for way in corrected["ways"]
    } == {"hierarchical"}
    for way in corrected["ways"]:
        (before,) = [
            each
            for each in plain["ways"]
            if (each["exchange"], each["values"]) == (way["exchange"], way["values"])
        ]
        ours = way["exchange"] in ("allgather", "sharded")
        assert (way["alone"]["kernels"] > before["alone"]["kernels"]) == ours
        assert way["alone"]["exchange"] == before["alone"]["exchange"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "1"], "--ranks 1: nothing is exchanged by fewer than 2"),
        (["--local-size", "0"], "--local-size 0: give 1 or more"),
        (["--powersgd", "0"], "--powersgd 0: give 1 or more"),
        (["--bandwidth", "fast"], "--bandwidth 'fast' is no bandwidth: write 100mbit"),
        (["--latency", "5"], "--latency '5' is no time: write 62.5ms"),
        (["--compute", "0ms"], "compute=0.0 s: give seconds above 0"),
        (["--forward", "2"], "forward=2.0: give a share from 0 to 1"),
        (["--cores", "0"], "cores=0.0: give a number that is above 0"),
        (["--values", "sign"], "--values sign: it is never recommended"),
        (["--crowd", "4"], "--crowd 4: say with --cores how many they share"),
        (["--ratio", "3"], "ratio=3.0 lies outside (0, 1]"),
        (["--model", "no.json"], "nor a file of shapes"),
        (["--machine", "no.json"], "no.json cannot be read: No such file"),
        (
            ["--measure", "--machine", "/absent/y.json"],
            "--machine /absent/y.json: there is no folder /absent",
        ),
        (["--measure"], "--measure: no ranks: run horovodrun -np 2 horovod-topk plan"),
    ],
)
def test_what_has_no_plan(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in frameworks.RANKS:
        monkeypatch.delenv(name, raising=False)
    assert cli.main([*SEED, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_constants_stay_when_their_file_cannot_be_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As where a disk is full when minutes of measuring are over."""
    place = arguments.Place(machines.read(machines.REFERENCE), Nodes(((0,), (1,))))
    monkeypatch.setattr(measure, "measure", lambda asked: place)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(machines, "write", full)
    path = tmp_path / "y.json"
    assert cli.main([*SEED, "--measure", "--machine", str(path)]) == 2
    text = capsys.readouterr().err
    assert f"--machine {path}: No space left on device. What it was to hold: " in text
    assert '"encode": ' in text


def test_compute_has_to_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["plan"])
    assert "--compute" in capsys.readouterr().err


def test_it_works_without_any_installed_package() -> None:
    """Neither a framework nor NumPy is needed to plan."""
    package = str(Path(cli.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-S", "-m", "horovod_topk.cli", *SEED],
        env={**os.environ, "PYTHONPATH": package},
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert "compress: " in done.stdout


@pytest.mark.parametrize("framework", ["Torch", "TensorFlow"])
def test_kernels_are_timed_in_either_framework(
    framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(f"horovod.{framework.lower()}")
    for name, few in (("SETTLE", 1), ("REPEATS", 2), ("BUCKET_ELEMENTS", 10_000)):
        monkeypatch.setattr(kernels, name, few)
    found = kernels.measure(getattr(frameworks, framework)(), TopKConfig())
    assert 0 < found.encode < 1e-3
    assert 0 < found.multiply < 1e-3
    assert 0 < found.triad < 1e-3
    assert found.clear >= 0 <= found.decode
