"""PyTorch and TensorFlow in one job."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from launcher import HOROVODRUN, run

pytestmark = [pytest.mark.distributed, pytest.mark.tools]

JOB = Path(__file__).parent / "mixed" / "job.py"
LIMIT = 300.0  # seconds; it needs about 15 on two idle cores


@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.one_in(2, first=1)
@pytest.mark.parametrize("controller", ["gloo", "mpi"])
def test_a_torch_rank_and_a_tensorflow_rank_meet(controller: str, tmp_path: Path) -> None:
    """Same gradients: same payload bytes every step, same residuals, same exchanged gradients."""
    command = [*HOROVODRUN, "-np", "2", f"--{controller}", sys.executable, str(JOB), str(tmp_path)]
    done = run(command, tmp_path, LIMIT, {})
    assert done.returncode == 0, done.describe()
    done.assert_clean()
    torch, tensorflow = (dict(np.load(tmp_path / f"rank-{rank}.npz")) for rank in (0, 1))
    gathered = [torch.pop(name) for name in list(torch) if "-gathered-" in name]
    assert len(gathered) == 12
    assert len({each.size for each in gathered}) == 3  # warm-up has larger payloads
    for both in gathered:
        assert np.array_equal(*both.reshape(2, -1))
    assert torch.keys() == tensorflow.keys()
    assert all(torch[name].tobytes() == tensorflow[name].tobytes() for name in torch)
    for kept in ("plain-residual-", "corrected-residual-", "corrected-velocity-"):
        assert any(torch[name].any() for name in torch if name.startswith(kept))
