"""TensorFlow on real ranks, and PyTorch and TensorFlow in one job.

The cases themselves are in tensorflow_ranks/case_*.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from launcher import Launch, launch_alone, launch_ranks, run
from test_launch import DYNAMIC_PROCESS_SETS, LIMIT, assert_all_passed, assert_clean

pytestmark = pytest.mark.distributed

CASES = Path(__file__).parent / "tensorflow_ranks"
JOB = Path(__file__).parent / "mixed" / "job.py"
CONTROLLERS = pytest.mark.parametrize("controller", ["gloo", "mpi"])

# Each line is a launch: with all cases in one, a busy machine would not end it in time.
OVER_BOTH = [
    (2, ("tape", "sharded", "hierarchical", "groups_ratios")),
    (3, ("tape", "sharded", "hierarchical", "groups_ratios")),
    (4, ("tape", "sharded", "hierarchical", "keras")),
]
# About files, states and optimizers, which know of no controller.
OVER_GLOO_ALONE = [
    (2, ("keras",)),
    (2, ("tf_scaling", "tf_warmup", "tf_momentum")),
    (2, ("state", "checkpoint")),
    (4, ("checkpoint",)),
    (2, ("tf_taking",)),
    (2, ("tf_rates", "tf_sparse")),
    (2, ("tf_lives", "tf_applying")),
]
RUNS = [("gloo", *each) for each in [*OVER_BOTH, *OVER_GLOO_ALONE]]
RUNS += [("mpi", *each) for each in OVER_BOTH]


def as_name(value: int | tuple[str, ...]) -> str:
    return "+".join(value) if isinstance(value, tuple) else str(value)


def launch(controller: str, size: int, folder: Path, *names: str) -> Launch:
    cases = [CASES / f"case_{name}.py" for name in names]
    settings = DYNAMIC_PROCESS_SETS if size > 2 else None
    return launch_ranks(
        cases, size=size, controller=controller, folder=folder, limit=LIMIT, settings=settings
    )


@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.parametrize(("controller", "size", "names"), RUNS, ids=as_name)
def test_cases_pass(controller: str, size: int, names: tuple[str, ...], tmp_path: Path) -> None:
    done = launch(controller, size, tmp_path, *names)
    assert_all_passed(done, size)
    assert_clean(done)


@pytest.mark.timeout(150)
def test_cases_pass_at_world_size_one(tmp_path: Path) -> None:
    done = launch_alone([CASES / "case_alone.py"], folder=tmp_path, limit=120)
    assert_all_passed(done, 1)
    assert_clean(done)


@pytest.mark.timeout(150)
@CONTROLLERS
def test_a_torch_rank_and_a_tensorflow_rank_meet(controller: str, tmp_path: Path) -> None:
    """Same gradients: same payload bytes every step, same residuals, same exchanged gradients."""
    command = ["horovodrun", "-np", "2", f"--{controller}", sys.executable, str(JOB), str(tmp_path)]
    done = run(command, tmp_path, 120, {})
    assert done.returncode == 0, done.describe()
    assert_clean(done)
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
