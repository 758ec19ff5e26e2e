"""torch.compile leaves the hooks of this package alone: no more graphs, and no bit changes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from launcher import HOROVODRUN, TORCHRUN, run

pytestmark = [pytest.mark.distributed, pytest.mark.tiers("rest", "all")]

JOB = str(Path(__file__).parent / "compiled" / "job.py")
LIMIT = 200.0  # seconds; it needs about 20 on two idle cores
STEPS = 10


@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.parametrize("adapter", ["ddp", "horovod", "fsdp"])
def test_compiled_steps_are_eager_ones_and_have_no_more_graphs_than_dense_ones(
    adapter: str, tmp_path: Path
) -> None:
    """Hooks that are traced are compiled anew in each step, for the numbers that they read."""
    horovod = [*HOROVODRUN, "-np", "2", "--gloo", sys.executable]
    torchrun = [*TORCHRUN, f"--nproc-per-node={4 if adapter == 'fsdp' else 2}"]
    launcher = horovod if adapter == "horovod" else torchrun
    done = run([*launcher, JOB, adapter, str(tmp_path)], tmp_path, LIMIT, {})
    assert done.returncode == 0, done.describe()
    done.assert_clean()
    found = json.loads((tmp_path / "found.json").read_text())
    for way in ("step_alone", "whole", "model_alone", "units"):
        ours, breaks, steps, weights = found[f"{way} True"]
        dense, dense_breaks, *_ = found.get(f"{way} False", found[f"{way} True"])
        assert ours <= dense > 0  # of an optimizer's step that is adapted nothing is left
        assert breaks <= dense_breaks + 1
        assert steps == STEPS
        assert weights == found["eager True"][-1] != found["eager False"][-1]
    if adapter == "fsdp":
        assert found["inductor True"][-1] == found["inductor False"][-1]
        assert "Set torch._dynamo.config.compiled_autograd to False" in found["compiled autograd"]
