"""A job that goes on with other numbers of real ranks owes what it owed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from launcher import HOROVODRUN, run

pytestmark = pytest.mark.distributed

JOB = Path(__file__).parent / "restart_jobs" / "train.py"
LIMIT = 240.0  # seconds a job; eight ranks need about 20 on two idle cores


@pytest.mark.timeout(3 * LIMIT + 60)
@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["sharded", "allgather"])
def test_eight_ranks_then_four_then_six(exchange: str, tmp_path: Path) -> None:
    before, left = "-", None
    for ranks in (8, 4, 6):
        after, report = tmp_path / f"of-{ranks}", tmp_path / f"report-{ranks}"
        script = [str(JOB), before, str(after), exchange, str(report)]
        command = [*HOROVODRUN, "--gloo", "-np", str(ranks), sys.executable, *script]
        done = run(command, tmp_path, LIMIT, {})
        assert done.returncode == 0, done.describe()
        assert not done.immortal
        found = json.loads(report.read_text())
        assert found["ranks"] == ranks
        for name, loaded in found["loaded"].items():
            expected = np.zeros(len(loaded)) if left is None else np.array(left[name])
            scale = max(np.abs(expected).max(), 1e-30)
            np.testing.assert_allclose(loaded, expected, rtol=1e-6, atol=1e-6 * scale)
        before, left = str(after), found["left"]
        assert any(np.abs(values).max() > 0 for values in left.values())
