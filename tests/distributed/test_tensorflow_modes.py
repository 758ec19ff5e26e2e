"""Compression works under modes of TensorFlow that a process cannot leave."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from launcher import HOROVODRUN, run

pytestmark = pytest.mark.distributed

SCRIPT = Path(__file__).parent / "tensorflow_modes" / "train.py"


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_determinism_and_checks_of_numerics(tmp_path: Path) -> None:
    command = [*HOROVODRUN, "--gloo", "-np", "2", sys.executable, str(SCRIPT)]
    done = run(command, tmp_path, 200.0, {})
    assert done.returncode == 0, done.describe()
    assert done.output.count("all trained") == 2
