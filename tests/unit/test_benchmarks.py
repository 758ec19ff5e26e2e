"""The benchmarks run and make their pages, on sizes that say nothing about speed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import bench
import bench_gpu
import bench_gpu_step
import bench_kernels
from horovod_topk.core.plan.buckets import TensorSpec

NUMEL = 5_000


def test_kernels() -> None:
    columns = ("plain", "topk", "exchange", "allowed", "memory", "allgather")
    found = {
        "machine": bench_kernels.machine(),
        "numel": NUMEL,
        "encoding": bench_kernels.measure_encoding(NUMEL, 0.01, 3),
        "decoding": {"packed": bench_kernels.measure_decoding(NUMEL, 0.01, 3, "packed")},
        "coding": bench_kernels.measure_coding(NUMEL, 0.01, 3),
        "shards": bench_kernels.measure_shards(NUMEL, 0.01, 3),
        "momentum": bench_kernels.measure_momentum(NUMEL, 3),
        "exchange": {
            "exact": [dict.fromkeys(columns, 2.0) | {"share": x} for x in (0.5, 0.8, 1.1)]
        },
        "sizes": [
            {"numel": NUMEL, "ratio": ratio, "ms": bench_kernels.measure_encoding(NUMEL, ratio, 3)}
            for ratio in bench_kernels.RATIOS
        ],
    }
    page = bench_kernels.report(found)
    for row in (
        "r += g",
        "torch.topk",
        "framework operations",
        "| packed | 8 |",
        "sign, packed",
        "8 owners",
        "sampled, momentum, masking and rescale |",
        "| 0.80 | 0.50, 0.80, 1.10 |",
    ):
        assert row in page
    if bench_kernels.available_isas():
        assert "portable, sampled" in page


def test_compression() -> None:
    steps = bench.ways(
        [TensorSpec("weight", (64, 80), "float32"), TensorSpec("bias", (64,), "float32")]
    )
    taken = bench.measure(steps, repeats=2)
    page = bench.report(taken, repeats=2)
    assert "| TopKEF, AdamW | " in page
    assert "| dense, AdamW |  |  |  | " in page
    times = [ms for turns in taken.values() for each in turns for ms in each.values()]
    assert len(times) == 2 * (1 + 3 + 1 + 1 + 3 + 1 + 2 + 1)
    assert all(ms > 0 for ms in times)


def test_the_one_for_gpus_can_be_imported() -> None:
    assert callable(bench_gpu.main)


def test_steps_on_a_gpu_here_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton")
    shapes = tmp_path / "shapes.json"
    shapes.write_text('{"weight": [64, 80], "bias": [64]}')
    command = f"bench_gpu_step.py --device cpu --repeats 2 --only SGD --model {shapes}"
    monkeypatch.setattr("sys.argv", command.split())
    assert bench_gpu_step.main() == 0
    page = capsys.readouterr().out
    rows = re.findall(r"^\| (?!ms|---)(.*?) \|", page, re.M)
    floors = ["`r += g`", "copy of the gradients"]
    assert rows == [*floors, "dense, SGD", "TopKEF(), SGD", "float32, SGD"]
    assert "bit for bit: TopKEF(), SGD." in page
