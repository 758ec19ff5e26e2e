"""The benchmarks run and make their pages, on sizes that say nothing about speed."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("horovod.torch")


import bench
import pages
from benchmarks import does_it_pay, kernels, methods, residuals, steps
from benchmarks.jobs import Jobs
from horovod_topk.cli.timing import in_turns
from horovod_topk.core.plan.buckets import TensorSpec

pytestmark = pytest.mark.tools

NUMEL = 5_000


def test_kernels() -> None:
    columns = ("plain", "topk", "exchange", "memory")
    found = {
        "machine": kernels.machine(),
        "numel": NUMEL,
        "encoding": kernels.measure_encoding(NUMEL, 0.01, 3),
        "decoding": {"packed": kernels.measure_decoding(NUMEL, 0.01, 3)},
        "coding": kernels.measure_coding(NUMEL, 0.01, 3),
        "shards": kernels.measure_shards(NUMEL, 0.01, 3),
        "exchange": {"exact": [dict.fromkeys(columns, x) for x in (0.5, 0.8, 1.1)]},
        "sizes": [
            {"numel": NUMEL, "ratio": ratio, "ms": kernels.measure_encoding(NUMEL, ratio, 3)}
            for ratio in kernels.RATIOS
        ],
    }
    values = kernels.values(found)
    assert re.findall(r"^\| (r \+= g|torch.topk|framework operations) ", values["encoding"], re.M)
    assert ("portable, sampled" in values["encoding"]) == bool(kernels.available_isas())
    assert len(values["decoding"].split(", ")) == len(values["owners"].split(", ")) == 4
    assert values["exchange"].endswith("| exact | 0.8 | 0.8 | 0.8 | 0.8 |")


def test_compression() -> None:
    specs = [TensorSpec("weight", (64, 80), "float32"), TensorSpec("bias", (64,), "float32")]
    taken = in_turns(steps.ways(specs), repeats=2, warm_up=3)
    there = kernels.machine() | {"features": "some"}
    rows = steps.values({"taken": taken, "machine": there})["rows"]
    assert "| TopKEF, AdamW | " in rows
    assert "| dense, AdamW |  |  |  | " in rows
    times = [ms for turns in taken.values() for each in turns for ms in each.values()]
    assert len(times) == 2 * (1 + 3 + 1 + 1 + 3 + 1 + 2 + 1)
    assert all(ms > 0 for ms in times)


def test_methods(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["methods", "--rows", "16", "--columns", "16", "--repeats", "1"]) == 0
    rows = re.findall(r"^\| (.*?) \|", capsys.readouterr().out, re.M)
    assert {*methods.CALLS, methods.FLOOR} < {*rows}


SCRIPTS = Path(kernels.__file__).parents[1]


@pytest.mark.parametrize("folder", ["", "benchmarks."])
def test_every_script_can_be_imported(folder: str) -> None:
    """Those that need a GPU, root or other programs too, as nothing else tests them."""
    pytest.importorskip("triton")
    for each in (SCRIPTS / folder.rstrip(".")).glob("*.py"):
        importlib.import_module(f"{folder}{each.stem}")


def test_jobs_asked_for_alone_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    named, measured = {"a": 1, "b": 2, "c": 3}, list[int]()

    def measure(job: int, _: object) -> dict[str, int]:
        measured.append(job)
        return {"found": len(measured)}

    jobs = Jobs("some", named, measure)
    for words in ("b", "--missing", "b a"):
        jobs.run(bench.parsed(SimpleNamespace(__doc__="", JOBS=jobs), words.split()))
    assert measured == [2, 1, 3, 2, 1]
    assert pages.json.loads(jobs.path.read_text()) == {
        name: {"found": last} for name, last in (("a", 5), ("b", 4), ("c", 3))
    }


def test_steps_on_a_gpu_here_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    shapes = tmp_path / "shapes.json"
    shapes.write_text('{"weight": [64, 80], "bias": [64]}')
    command = f"--device cpu --repeats 2 --only SGD --model {shapes}"
    assert bench.main(["gpu_steps", *command.split()]) == 0
    page = capsys.readouterr().out
    rows = re.findall(r"^\| (?!ms|---)(.*?) \|", page, re.M)
    assert rows == ["`r += g`", "dense, SGD", "TopKEF(), SGD", "float32, SGD"]
    assert "bit for bit: TopKEF(), SGD." in page


# Norms of residuals


@pytest.mark.parametrize("run", residuals.RUNS, ids=lambda run: run.name)
def test_a_run_keeps_to_its_bound(run: residuals.Run) -> None:
    ranks = residuals.train(run, steps=8)["ranks"]
    assert len(ranks) == 4
    for rank in ranks:
        bound = residuals.karimireddy(residuals.RATIO) * rank["largest_gradient"]
        assert 0 < rank["largest_residual"] <= bound


def test_without_data_there_is_no_residual() -> None:
    *_, other, idle = residuals.train(residuals.Run("idle", "", idle_every=1), steps=2)["ranks"]
    assert idle == {"largest_gradient": 0.0, "largest_residual": 0.0}
    assert other["largest_residual"] > 0


def test_local_steps_are_compared_with_compute_and_with_each_other() -> None:
    def result(seconds: list[float], sent: float, waits: float = 0.0) -> dict[str, list[float]]:
        parts = {part: [waits / 3 * each for each in seconds] for part in does_it_pay.PARTS}
        return {"seconds": seconds, "bytes": [sent] * 3, "exchange": [30 * sent] * 3, **parts}

    found = {
        does_it_pay.ALONE: result([0.9, 1.0, 1.2], 0.0),
        does_it_pay.LOCAL: result([1.25, 1.3, 1.1], 2e6, 0.05),
        does_it_pay.TOPK: result([2.4, 2.5, 2.6], 4e6),
    }
    *_, alone, local, each_step = does_it_pay.seconds_table(found, does_it_pay.LOCAL).splitlines()
    assert alone == "| compute alone | 1.00 s (0.90 to 1.20) | 100.0% | - | - | 0.80 |"
    assert local == "| local steps | 1.25 s (1.10 to 1.30) | 95.0% | 2 MB | 60 MB | 1.00 |"
    assert each_step == "| TopKEF | 2.50 s (2.40 to 2.60) | 40.0% | 4 MB | 120 MB | 2.00 |"
