"""A job that goes on with other numbers of real ranks owes what it owed."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from launcher import HOROVODRUN, LAUNCHED_AS, RANKS, TORCHRUN, run

pytestmark = pytest.mark.distributed

# Else ranks of the second life may read in torchrun's store where those of the first listened.
APART = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
LIMIT = 240.0  # seconds a job; eight ranks need about 20 on two idle cores


def under(controller: str, ranks: int) -> list[str]:
    if controller == "torchrun":
        return [*TORCHRUN, f"--nproc-per-node={ranks}"]
    return [*HOROVODRUN, f"--{controller}", "-np", str(ranks), sys.executable]


@pytest.mark.timeout(3 * LIMIT + 60)
@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["sharded", "allgather"])
@pytest.mark.parametrize(("controller", "numbers"), [("gloo", (8, 4, 6)), ("torchrun", (4, 2, 3))])
def test_residuals_stay_when_the_number_of_ranks_changes(
    controller: str, numbers: Sequence[int], exchange: str, tmp_path: Path
) -> None:
    before, left = "-", None
    for ranks in numbers:
        after, report = tmp_path / f"of-{ranks}", tmp_path / f"report-{ranks}"
        job = [str(RANKS / "restarted.py"), before, str(after), exchange, str(report)]
        settings = {LAUNCHED_AS: f"all {controller}"}
        done = run([*under(controller, ranks), *job], tmp_path, LIMIT, settings)
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


@pytest.mark.timeout(2 * LIMIT + 60)
@pytest.mark.slow
def test_a_rank_that_is_killed_under_torchrun_costs_no_bit(tmp_path: Path) -> None:
    """torchrun starts all ranks again, and they go on from the last checkpoint."""
    ends = []
    for name, dies_after in (("killed", 5), ("not killed", 0)):
        folder = tmp_path / name
        folder.mkdir()
        command = [
            *TORCHRUN,
            "--max-restarts=1",
            "--nproc-per-node=2",
            str(RANKS / "killed_ddp.py"),
        ]
        done = run([*command, str(folder), str(dies_after)], tmp_path, LIMIT, APART)
        assert done.returncode == 0, done.describe()
        assert not done.immortal
        ends.append(torch.load(folder / "end", weights_only=True))
    killed, whole = ends
    assert (killed["resumed"], whole["resumed"]) == (5, 0)
    assert killed["weights"] == whole["weights"]
