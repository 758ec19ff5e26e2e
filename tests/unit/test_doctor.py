"""`horovod-topk doctor` says which code compresses, and why."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from horovod_topk import cli
from horovod_topk.kernels import native


def lines(**variables: str) -> dict[str, str]:
    """What it prints in a fresh interpreter, by its first column."""
    done = subprocess.run(
        [sys.executable, "-m", "horovod_topk.cli", "doctor"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **variables},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    return {line[:22].strip(): line[22:] for line in done.stdout.splitlines()}


@pytest.mark.skipif(not native.LIBRARY.exists(), reason="no kernels were built")
def test_what_it_says_of_kernels() -> None:
    found = lines(HOROVOD_TOPK_NATIVE="1", HOROVOD_TOPK_ISA="portable")
    assert found["kernels for the CPU"].startswith("portable (")
    assert found["in TensorFlow graphs"] == "the same, as operations of a graph"
    assert found["kernels for the GPU"] == "PyTorch sees no GPU"


def test_what_it_says_without_them() -> None:
    found = lines(HOROVOD_TOPK_NATIVE="0")
    reason = "none, framework operations do the work: HOROVOD_TOPK_NATIVE=0"
    assert found["kernels for the CPU"] == reason
    assert found["in TensorFlow graphs"].startswith("none, TensorFlow's own operations")


def test_an_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["cure"])
    assert "doctor" in capsys.readouterr().err
