"""`horovod-topk bytes`: what is sent, from the plan alone."""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from horovod_topk import cli
from horovod_topk.cli.models import specs_of
from horovod_topk.cli.options import MOST_LOCAL, MOST_RANKS
from horovod_topk.core.plan.buckets import make_plan
from horovod_topk.methods import METHODS
from horovod_topk.methods.topk import VALUES, TopK

pytestmark = pytest.mark.tools


def rows(text: str) -> dict[tuple[str, str], tuple[int, float]]:
    """(exchange, values) -> bytes a rank sends, and how many times fewer leave a node."""
    table = [
        line.split() for line in text.partition("\n\n")[0].partition("of fp16\n")[2].splitlines()
    ]
    return {(e, v): (int(b.replace(",", "")), float(x[:-1])) for e, v, b, _, x, *_ in table}


def taken(text: str) -> set[str]:
    """The exchanges that `auto` takes."""
    return {line.split()[0] for line in text.splitlines() if line.endswith("auto")}


def test_every_format_and_exchange_against_dense(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bytes", "--ratio", "0.01", "--ranks", "8"]) == 0
    text = capsys.readouterr().out
    found = rows(text)
    assert found["allreduce", "float32"] == (2 * 7 * 4 * 25_557_032 // 8, 1.0)
    assert set(found) - {("allreduce", "float32"), ("allreduce", "float16")} == {
        (exchange, values) for exchange in ("allgather", "sharded") for values in VALUES
    }
    assert taken(text) == {"sharded"}
    default = [line for line in text.splitlines() if "default" in line]
    assert [line.split()[:2] for line in default] == [["allgather", "int4"]]


def test_memory_of_each_format_of_residuals(capsys: pytest.CaptureFixture[str]) -> None:
    """Beside 8 bytes of residuals, SGD's arrivals take 1 a parameter."""
    assert cli.main(["bytes", "--ranks", "8", "--local-size", "4"]) == 0
    _, head, *lines = capsys.readouterr().out.partition("\n\n")[2].splitlines()
    assert head.split() == ["residuals", "allgather", "sharded", "hierarchical"]
    found = {kind: [float(each) for each in rest] for kind, *rest in map(str.split, lines)}
    assert found == {
        "float32": [9.0, 10.0, 3.0],
        "bfloat16": [5.0, 5.5, 2.0],
        "int8": [3.03, 3.29, 1.51],
        "int4": [2.03, 2.16, 1.26],
    }
    assert cli.main(["bytes", "--optimizer", "none"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["int4", "1.03", "1.16"]


CALLS = {
    "RandomK": (1.0, "reduce"),
    "Dense(values='bfloat16')": (2.0, "sharded"),
    "QSGD": (7.75 / 4, "allgather"),
    "QSGD(bits=2, block=1024, exchange='sharded')": (15.875, "sharded"),
    "SignSGD(exchange='sharded')": (31.5, "sharded"),
    "SignSGD(majority=True)": (32.0 / 4, "allgather"),
    "OneBit": (30.4 / 4, "allgather"),
    "ByteGrad": (3.98, "sharded"),
    "TernGrad": (20.0 / 4, "allgather"),
    "Threshold": (61.6 / 4, "allgather"),
    "TernGrad(exchange='sharded')": (20.0, "sharded"),
    "PowerSGD": (55.5, "reduce"),
}


@pytest.mark.parametrize("call", CALLS)
def test_every_other_method_has_a_row(call: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of ResNet-50 on 8 ranks; an allgather sends P / 2 times a reduction's bytes."""
    times, exchange = CALLS[call]
    assert cli.main(["bytes", "--ranks", "8", "--compressor", call]) == 0
    *_, above, line = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    kind, name, sent, _, fewer, *_ = line.split()
    assert (kind, name) == (exchange, call.split("(")[0])
    assert line.endswith((call, f"{call}()")) or above == f"{call}:"
    dense = 2 * 7 * 4 * 25_557_032 / 8
    assert dense / int(sent.replace(",", "")) == pytest.approx(float(fewer[:-1]), abs=0.06)
    if call != "RandomK":
        assert float(fewer[:-1]) == pytest.approx(times, rel=0.12)


def test_every_method_is_among_them() -> None:
    assert {call.split("(")[0] for call in CALLS} == set(METHODS) - {"TopKEF"}


def test_a_gpu_sends_the_bytes_of_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    found = {}
    for device, name in (("cpu", "CPU"), ("cuda", "GPU")):
        assert cli.main(["bytes", "--ratio", "0.01", "--device", device]) == 0
        text = capsys.readouterr().out
        assert f"ratio 0.01, gradients on a {name}: bytes a step" in " ".join(text.split())
        found[device] = rows(text)
    assert found["cpu"] == found["cuda"]
    assert found["cuda"]["allgather", "float32"][1] == 18.4


def test_the_adapter_plans_the_same_for_a_tensor_that_is_not_on_the_cpu(
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("horovod.torch")
    spec_of = importlib.import_module("horovod_topk.torch_training.gradients").spec_of
    known = specs_of("resnet18")
    specs = [spec_of(spec.name, torch.empty(spec.shape, device="meta")) for spec in known]
    buckets = make_plan(specs, TopK(ratio=0.01, values="float32")).buckets
    cli.main(["bytes", "--ratio", "0.01", "--model", "resnet18", "--device", "cuda"])
    sent = rows(capsys.readouterr().out)["allgather", "float32"][0]
    assert sent == sum(7 * bucket.layout.payload_bytes for bucket in buckets)


def test_nodes_make_a_difference(capsys: pytest.CaptureFixture[str]) -> None:
    """Two nodes of four: the busiest node's bytes, and what `auto` makes of them."""
    two = ["bytes", "--ratio", "0.01", "--ranks", "8", "--local-size", "4"]
    assert cli.main(two) == 0
    assert taken(capsys.readouterr().out) == {"sharded"}  # hierarchical does not adapt SGD's steps
    assert cli.main([*two, "--optimizer", "none"]) == 0
    text = capsys.readouterr().out
    assert "8 ranks on 2 nodes" in text
    assert taken(text) == {"hierarchical"}
    found = rows(text)
    assert found["hierarchical", "int8"][1] > 250
    assert 40 < found["sharded", "int8"][1] < found["hierarchical", "int8"][1]
    cli.main(["bytes", "--ratio", "0.01", "--ranks", "8", "--local-size", "8"])
    assert taken(capsys.readouterr().out) == {"allgather"}
    cli.main(["bytes", "--ratio", "0.01", "--ranks", "3", "--local-size", "2"])
    assert "3 ranks on 2 nodes" in capsys.readouterr().out


def test_the_rank_that_sends_most_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """On uneven nodes that is none of the owners, of which the first rank is one."""
    assert cli.main(["bytes", "--ratio", "0.01", "--ranks", "7", "--local-size", "3"]) == 0
    assert rows(capsys.readouterr().out)["hierarchical", "int8"][0] == 103_897_280


@pytest.mark.parametrize(
    ("model", "parameters", "tensors"),
    [
        ("resnet18", 11_689_512, 62),
        ("resnet50", 25_557_032, 161),
        ("bert-base", 109_482_240, 199),
        ("gpt2", 124_439_808, 148),
    ],
)
def test_models_have_the_parameters_they_are_known_for(
    model: str, parameters: int, tensors: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bytes", "--ratio", "0.01", "--model", model]) == 0
    assert capsys.readouterr().out.startswith(f"{parameters:,} float32 in {tensors} tensors")


def test_shapes_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps({"weight": [300, 400], "bias": [400]}))
    assert cli.main(["bytes", "--ratio", "0.01", "--model", str(path), "--ranks", "2"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("120,400 float32 in 2 tensors, 2 ranks")
    assert rows(text)["allreduce", "float32"][0] == 4 * 120_400


def test_who_reads_one_line_gets_one_line() -> None:
    command = [sys.executable, "-m", "horovod_topk.cli", "bytes", "--model", "resnet18"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 128 + signal.SIGPIPE


@pytest.mark.parametrize("local_size", [1, MOST_LOCAL])
def test_the_most_ranks_have_a_table(local_size: int, capsys: pytest.CaptureFixture[str]) -> None:
    """In less than a second: owners whose shards are equally large share a plan."""
    nodes = ["--ranks", str(MOST_RANKS), "--local-size", str(local_size)]
    assert cli.main(["bytes", "--model", "resnet18", *nodes]) == 0
    assert f"{MOST_RANKS:,} ranks on " in capsys.readouterr().out


def test_local_steps_divide_the_bytes_of_an_exchange(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bytes", "--ranks", "2", "--local-steps", "30"]) == 0
    table = capsys.readouterr().out.partition("LocalSteps(every=30)")[2].splitlines()[2:]
    lines = [line.replace(",", "").split() for line in table]
    assert [line[0] for line in lines] == list(VALUES)
    for _, exchange, step, _ in lines:
        assert round(int(exchange) / 30) == int(step)


@pytest.mark.parametrize(
    ("model", "values", "least"),
    [("resnet50", "int2", 202), ("gpt2", "int2", 203), ("gpt2", "int3", 184)],
)
def test_two_bits_at_one_in_sixty_four_are_two_hundred_times_fewer_bytes(
    model: str, values: str, least: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scales, headers and small tensors included, with an allgather among two ranks."""
    cli.main(["bytes", "--model", model, "--ratio", str(1 / 64), "--ranks", "2"])
    assert rows(capsys.readouterr().out)["allgather", values][1] > least
