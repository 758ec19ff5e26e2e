"""`horovod-topk plan` on the command line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from horovod_topk import cli
from horovod_topk.cli import frameworks
from horovod_topk.cli.options import Parser, add, joined
from horovod_topk.cli.plan import kernels, measure
from horovod_topk.core.plan.nodes import Nodes
from horovod_topk.cost import machine as machines
from horovod_topk.cost.strategies import Multiples
from horovod_topk.methods import METHODS
from horovod_topk.methods.topk import TopK

pytestmark = pytest.mark.tools

SEED = ["plan", "--model", "resnet18", "--compute", "62.5ms", "--bandwidth", "10gbit"]


def found(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.main([*SEED, "--json", *arguments]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(SEED) == 0
    text = capsys.readouterr().out
    assert text.startswith("resnet18: 11,689,512 float32 in 62 tensors, 8 ranks on 8 nodes")
    assert re.search(r"^(do not )?compress: ", text, re.M)
    assert ", with SGD with momentum, gradients on a CPU" in " ".join(text.split())
    assert "\nTopKEF() without settings: allgather int4\n" in text
    for strategy in ("allreduce    float16", "PowerSGD     rank 4", "sharded      int4"):
        assert strategy in text
    assert "constants: " in text
    assert "hierarchical" not in text


def test_any_method_has_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the bytes of the command `bytes`; the verdict is about TopKEF alone."""
    monkeypatch.setattr(kernels, "multiples", lambda framework, config: Multiples(5.0, 1.0))
    calls = [name for name in METHODS if name != "TopKEF"] + ["TernGrad(exchange='hierarchical')"]
    path = tmp_path / "small.json"
    path.write_text('{"w": [300, 400], "b": [400]}')
    options = ["--model", str(path), "--local-size", "2"]
    options += [part for call in calls for part in ("--compressor", call)]
    assert cli.main(["bytes", *options]) == 0
    sent, _, _ = capsys.readouterr().out.partition("\n\n")
    lines = [line for line in sent.splitlines() if not line.endswith(":")][-len(calls) :]
    listed = [tuple(each.replace(",", "") for each in line.split()[:4]) for line in lines]
    answer = found(capsys, *options, "--values", "int4")
    planned = [
        (row["exchange"], row["values"], str(row["sent_bytes"]), str(row["node_bytes"]))
        for row in answer["strategies"][-len(calls) :]
    ]
    assert planned == listed
    assert all(row["overlapped"]["kernels"] > 0 for row in answer["strategies"][-len(calls) :])
    assert "compress: TopKEF() makes a step " in answer["verdict"]
    assert "TernGrad" in answer["assumptions"]["other compressors"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", METHODS)
def test_what_a_method_computes_is_timed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SOME", (64, 64))
    framework = frameworks.find()
    assert framework is not None
    exchange = METHODS[name]().exchange
    measured = kernels.multiples(framework, METHODS[name](exchange=exchange))
    assert measured.encode > 0
    assert measured.decode >= 0


def test_json_agrees_with_itself(capsys: pytest.CaptureFixture[str]) -> None:
    answer = found(capsys, "--values", "float32", "int8", "--latency", "50us", "--no-overlap")
    assert (answer["ranks"], answer["nodes"], answer["overlap"]) == (8, 8, False)
    assert answer["machine"]["network"]["bandwidth"] == 1e10
    assert answer["machine"]["network"]["latency"] == pytest.approx(5e-5)
    dense, *_ = answer["strategies"]
    alone = dense["alone"]
    assert alone["seconds"] == pytest.approx(0.0625 + alone["exchange"])
    assert alone["efficiency"] == pytest.approx(0.0625 / alone["seconds"])
    fastest = min(
        strategy["alone"]["seconds"]
        for strategy in answer["strategies"]
        if strategy["exchange"] in "allgather sharded"
    )
    assert answer["compress"] == (fastest < alone["seconds"])


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
    assert all(strategy["alone"]["kernels"] == 0 for strategy in answer["strategies"])


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    assert cli.main([*SEED, "--picture", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("option", ["--momentum", "--optimizer=sgd", "--optimizer=adam"])
def test_momentum_correction_and_adapted_steps_take_time_and_no_process_sets(
    capsys: pytest.CaptureFixture[str], option: str
) -> None:
    nodes = ("--ranks", "8", "--local-size", "4", "--values", "int4")
    plain = found(capsys, *nodes, "--optimizer", "none")
    corrected = found(capsys, *nodes, option)
    assert {strategy["exchange"] for strategy in plain["strategies"]} - {
        strategy["exchange"] for strategy in corrected["strategies"]
    } == {"hierarchical"}
    for strategy in corrected["strategies"]:
        (before,) = [
            each
            for each in plain["strategies"]
            if (each["exchange"], each["values"]) == (strategy["exchange"], strategy["values"])
        ]
        ours = strategy["exchange"] in ("allgather", "sharded")
        assert (strategy["alone"]["kernels"] > before["alone"]["kernels"]) == ours
        same = pytest.approx(before["alone"]["exchange"], rel=0.01)  # Adam's payloads say more
        assert strategy["alone"]["exchange"] == same


def test_constants_stay_when_their_file_cannot_be_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As where a disk is full when minutes of measuring are over."""
    found = machines.read(machines.REFERENCE), Nodes(((0,), (1,)))
    monkeypatch.setattr(measure, "measure", lambda asked: found)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(machines, "write", full)
    path = tmp_path / "y.json"
    assert cli.main([*SEED, "--measure", "--machine", str(path)]) == 2
    text = capsys.readouterr().err
    assert f"--machine {path}: No space left on device. Its content would have been: " in text
    assert '"encode": ' in text


def test_a_negative_value_belongs_to_the_option_before_it() -> None:
    assert joined(["plan", "--compute", "-5ms", "--json"]) == ["plan", "--compute=-5ms", "--json"]
    assert joined(["--forward", "-.5"]) == ["--forward=-.5"]
    script = ["bench", "--script", "train.py", "--", "--lr", "-1"]
    assert joined(script) == script


def test_a_gpu_has_the_bytes_and_the_constants_of_a_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless a file gives constants that were measured on a GPU."""
    on_cpu, on_gpu = found(capsys), found(capsys, "--device", "cuda")
    assert (on_cpu["device"], on_gpu["device"]) == ("cpu", "cuda")
    for before, after in zip(on_cpu["strategies"], on_gpu["strategies"], strict=True):
        assert after["node_bytes"] == before["node_bytes"]
        assert after["alone"]["kernels"] == before["alone"]["kernels"]
    assert "device" not in on_cpu["assumptions"]
    assert "CPU kernel constants are applied to a GPU's" in on_gpu["assumptions"]["device"]
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(on_gpu["machine"] | {"device": "cuda"}))
    measured = found(capsys, "--device", "cuda", "--machine", str(path))
    assert "device" not in measured["assumptions"]
    mixed = found(capsys, "--machine", str(path))
    assert "GPU kernel constants are applied to a CPU's" in mixed["assumptions"]["device"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_table_says_what_it_assumes(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*SEED, "--device", device]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"gradients on a {'GPU' if device == 'cuda' else 'CPU'}" in text
    assert ("device: CPU kernel constants are applied" in text) == (device == "cuda")
    assert "overlap: the verdict and the last column assume that backward overlaps" in text
    assert "ms) with SGD with momentum, with overlap, and pays below " in text
    assert cli.main([*SEED, "--no-overlap"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "assume that nothing overlaps (--no-overlap)" in text
    assert "ms) with SGD with momentum, without overlap, and pays below " in text


def test_the_default_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    """At 42 Gbit/s plain error feedback pays; `TopKEF()` adapts SGD's steps, and does not."""
    fast = ["--model", "resnet50", "--bandwidth", "42gbit"]
    bare, plain = found(capsys, *fast), found(capsys, *fast, "--optimizer", "none")
    assert bare == found(capsys, *fast, "--optimizer", "sgd")
    assert (bare["adapted"], bare["compress"], bare["default"]) == ("sgd", False, "allgather int4")
    assert " ms with SGD with momentum, with overlap: its exchange takes " in bare["verdict"]
    assert " TopKEF() itself (allgather int4) takes 81.9 ms: 1.08 times slower" in bare["verdict"]
    assert (plain["adapted"], plain["compress"]) == (None, True)
    assert " ms) with plain error feedback, with overlap, and pays below " in plain["verdict"]
    adam = found(capsys, *fast, "--optimizer", "adam")
    assert not adam["compress"]
    assert " ms with Adam or AdamW, with overlap: " in adam["verdict"]
    assert found(capsys, *fast, "--ratio", "0.01")["default"] is None


@pytest.mark.parametrize("command", ["doctor", "bytes", "bench", "plan"])
def test_every_option_has_its_help(command: str) -> None:
    """And says its default, or that it is required."""
    parser = Parser()
    add(parser, cli.COMMANDS[command].OPTIONS)
    for action in parser._actions:
        if action.option_strings and action.dest != "help":
            text = action.help or ""
            assert "default: " in text or "required" in text, action.option_strings


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
    found = kernels.measure(getattr(frameworks, framework)(), TopK())
    assert 0 < found.encode < 1e-3
    assert 0 < found.multiply < 1e-3
    assert 0 < found.triad < 1e-3
    assert found.clear >= 0 <= found.decode


def test_local_steps_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    """Their exchange is divided by the steps; a longer round has a larger share of compute."""
    shares = []
    for every in ("10", "100"):
        assert cli.main([*SEED, "--local-steps", every]) == 0
        text = " ".join(capsys.readouterr().out.split())
        found = re.search(rf"LocalSteps\(every={every}\) .* \((\d+\.\d)% compute\)", text)
        assert found is not None
        shares.append(float(found[1]))
    assert shares[0] < shares[1] <= 100.0
