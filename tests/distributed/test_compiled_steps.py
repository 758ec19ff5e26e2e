"""torch.compile leaves the hooks of this package alone: it makes as many graphs as without them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from launcher import HOROVODRUN, TORCHRUN, run

pytestmark = [pytest.mark.distributed, pytest.mark.tiers("rest", "all")]

JOB = str(Path(__file__).parent / "compiled" / "job.py")
LIMIT = 200.0  # seconds; it needs about 10 on two idle cores
STEPS = 10


@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.parametrize("adapter", ["ddp", "horovod"])
def test_compiled_steps_have_the_graphs_of_dense_ones(adapter: str, tmp_path: Path) -> None:
    """Hooks that are traced are compiled anew in each step, for the numbers that they read."""
    horovod = [*HOROVODRUN, "-np", "2", "--gloo", sys.executable]
    launcher = horovod if adapter == "horovod" else [*TORCHRUN, "--nproc-per-node=2"]
    done = run([*launcher, JOB, adapter, str(tmp_path)], tmp_path, LIMIT, {})
    assert done.returncode == 0, done.describe()
    done.assert_clean()
    found = json.loads((tmp_path / "found.json").read_text())
    for way in ("step_alone", "whole"):
        (dense, dense_breaks, _), (ours, breaks, steps) = (
            found[f"{way} {compresses}"] for compresses in (False, True)
        )
        assert ours == dense > 0
        assert breaks <= dense_breaks
        assert steps == STEPS
