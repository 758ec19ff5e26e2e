"""`horovod-topk plan --measure` and `horovod-topk doctor` with real ranks."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from launcher import HOROVODRUN, REPOSITORY, run

pytestmark = [pytest.mark.distributed, pytest.mark.tools]

LIMIT = 240.0  # seconds; a quarter of a minute on idle cores
MODULE = ["-m", "horovod_topk.cli"]
COMMAND = [sys.executable, *MODULE]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
WITHOUT_TORCH = Path(__file__).parent / "without_torch"
ON_TENSORFLOW = ["env", f"PYTHONPATH={WITHOUT_TORCH}{os.pathsep}{REPOSITORY}"]


@pytest.mark.one_in(3)
@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.parametrize(
    "ranks",
    [
        [*HOROVODRUN, "-np", "2", "--gloo", sys.executable],
        [*HOROVODRUN, "-np", "2", "--mpi", sys.executable],
        [*ON_TENSORFLOW, *HOROVODRUN, "-np", "2", "--gloo", sys.executable],
        [*TORCHRUN, "--nproc-per-node=2"],
    ],
    ids=["torch-gloo", "torch-mpi", "tensorflow-gloo", "torchrun"],
)
def test_constants_are_measured_and_kept(ranks: list[str], tmp_path: Path) -> None:
    """One rank prints; what it found can be planned with afterwards."""
    kept = tmp_path / "machine.json"
    arguments = ["plan", "--model", "resnet18", "--compute", "62.5ms", "--machine", str(kept)]
    launch = run([*ranks, *MODULE, *arguments, "--measure"], tmp_path, LIMIT, {})
    assert launch.returncode == 0, launch.output
    launch.assert_clean()
    assert launch.output.count("compress: ") == 1
    assert "2 ranks on 1 node" in launch.output
    found = json.loads(kept.read_text())
    assert 1e6 < found["network"]["bandwidth"] < 1e14
    assert 1e-11 < found["kernels"]["encode"] < 1e-6
    assert found["origin"].startswith("measured with 2 ranks on 1 node")
    again = run([*COMMAND, *arguments, "--bandwidth", "1gbit"], tmp_path, LIMIT, {})
    assert again.returncode == 0, again.output
    assert found["origin"] in again.output


@pytest.mark.slow
@pytest.mark.timeout(LIMIT + 60)
def test_uneven_hosts_are_planned_as_they_are(tmp_path: Path) -> None:
    """Rank 0 is alone on its host, and others are not."""
    arguments = ["plan", "--model", "resnet18", "--compute", "62.5ms", "--measure"]
    arguments += ["--optimizer", "none"]  # the hierarchical exchange adapts no optimizer's steps
    ranks = [*HOROVODRUN, "-np", "3", "-H", "127.0.0.1:1,localhost:2", "--gloo", *COMMAND]
    launch = run([*ranks, *arguments], tmp_path, LIMIT, {})
    assert launch.returncode == 0, launch.output
    launch.assert_clean()
    assert "measured with 3 ranks on 2 nodes" in launch.output
    assert "hierarchical  float32" in launch.output


@pytest.mark.timeout(LIMIT + 60)
def test_two_ranks_exchange_for_the_doctor(tmp_path: Path) -> None:
    launch = run([*COMMAND, "doctor"], tmp_path, LIMIT, {})
    assert launch.returncode == 0, launch.output
    launch.assert_clean()
    assert "two ranks exchange    an allgather of 64 KiB a rank in " in launch.output
