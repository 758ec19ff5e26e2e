"""The launcher itself: it notices what goes wrong on a rank, and it leaves no process behind."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from launcher import RANKS, TAG, launch_ranks, run

pytestmark = [pytest.mark.distributed, pytest.mark.tools]

DELIBERATE = RANKS / "deliberate"


@pytest.mark.timeout(300)
def test_a_hung_collective_fails_its_case_and_ends_the_launch(tmp_path: Path) -> None:
    launch = launch_ranks(
        [DELIBERATE / "case_misbehaviour.py"],
        size=2,
        controller="gloo",
        folder=tmp_path,
        limit=240,
        settings={"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0"},  # Horovod itself would wait for ever
    )
    assert launch.returncode not in (0, None), launch.describe()
    assert "Timeout" in launch.output
    assert "test_one_rank_never_joins_a_collective" in launch.output
    assert not any("never_joins" in case for case in launch.passed_cases(0))
    launch.assert_clean()
    (failure,) = launch.failures()
    assert (failure.rank, failure.case.split("::")[1]) == (1, "test_only_rank_one_fails")
    assert "deliberate failure on rank 1" in launch.describe()
    assert any("after_a_failure" in case for case in launch.passed_cases(0))


def test_a_launch_that_overstays_is_killed_with_all_its_children(tmp_path: Path) -> None:
    command = "setsid sleep 600 & echo ready; exec sleep 600"
    launch = run(["sh", "-c", command], tmp_path, 2.0, {})
    assert "ready" in launch.output
    assert launch.returncode is None
    assert launch.seconds < 60
    assert not launch.immortal


def test_a_process_left_behind_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.GRACE", 0.5)
    daemon = f"import os, time; assert os.environ[{TAG!r}]; time.sleep(600)"
    parent = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {daemon!r}], start_new_session=True)\n"
        "time.sleep(0.3)"
    )
    launch = run([sys.executable, "-c", parent], tmp_path, 90.0, {})
    assert launch.returncode == 0
    assert [line for line in launch.left if "time.sleep(600)" in line]
    with pytest.raises(AssertionError, match="alive after the launch"):
        launch.assert_clean()
    assert not launch.immortal
