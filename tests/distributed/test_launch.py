"""Everything that needs real ranks: one launch for each controller and number of ranks.

The cases themselves are in ranks/case_*.py. A launch that fails shows each failing case with the
rank it failed on.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from launcher import RANKS, TAG, Launch, launch_alone, launch_ranks, run

pytestmark = pytest.mark.distributed

LIMIT = 300.0  # seconds a launch may take; it needs about 25 on two idle cores
DYNAMIC_PROCESS_SETS = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}  # for process sets made in a case
ALONE = RANKS / "case_alone.py"
NODES = RANKS / "case_nodes.py"
DELIBERATE = RANKS / "deliberate"
SHARED = sorted(set(RANKS.glob("case_*.py")) - {ALONE, NODES})


def assert_clean(launch: Launch) -> None:
    assert not launch.immortal, launch.immortal
    assert not launch.left, f"alive after the launch ended: {launch.left}"


def assert_all_passed(launch: Launch, size: int) -> None:
    assert launch.returncode == 0, launch.describe()
    assert not launch.failures(), launch.describe()
    passed = [launch.passed_cases(rank) for rank in range(size)]
    assert passed[0], launch.describe()
    assert all(cases == passed[0] for cases in passed), launch.describe()


@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("controller", ["gloo", "mpi"])
def test_cases_pass_on_every_rank(controller: str, size: int, tmp_path: Path) -> None:
    launch = launch_ranks(
        SHARED,
        size=size,
        controller=controller,
        folder=tmp_path,
        limit=LIMIT,
        settings=DYNAMIC_PROCESS_SETS if size > 2 else None,
    )
    assert_all_passed(launch, size)
    assert_clean(launch)


@pytest.mark.parametrize("settings", [DYNAMIC_PROCESS_SETS, {}], ids=["dynamic", "static"])
def test_hosts_are_nodes(settings: dict[str, str], tmp_path: Path) -> None:
    launch = launch_ranks(
        [NODES],
        size=4,
        controller="gloo",
        folder=tmp_path,
        limit=90,
        settings=settings,
        hosts="localhost:2,127.0.0.1:2",
    )
    assert_all_passed(launch, 4)
    assert_clean(launch)


def test_cases_pass_at_world_size_one(tmp_path: Path) -> None:
    launch = launch_alone([ALONE], folder=tmp_path, limit=60)
    assert_all_passed(launch, 1)
    assert_clean(launch)


def test_a_hung_collective_fails_its_case_and_ends_the_launch(tmp_path: Path) -> None:
    launch = launch_ranks(
        [DELIBERATE / "case_misbehaviour.py"],
        size=2,
        controller="gloo",
        folder=tmp_path,
        limit=90,
        arguments=["--timeout=3"],
        settings={"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0"},  # Horovod itself would wait for ever
    )
    assert launch.returncode not in (0, None), launch.describe()
    assert "Timeout" in launch.output
    assert "test_one_rank_never_joins_a_collective" in launch.output
    assert not any("never_joins" in case for case in launch.passed_cases(0))
    assert_clean(launch)
    (failure,) = launch.failures()
    assert (failure.rank, failure.case.split("::")[1]) == (1, "test_only_rank_one_fails")
    assert "deliberate failure on rank 1" in launch.describe()
    assert any("after_a_failure" in case for case in launch.passed_cases(0))


def test_a_launch_that_overstays_is_killed_with_all_its_children(tmp_path: Path) -> None:
    child = "import time; time.sleep(600)"
    parent = (
        "import subprocess, sys\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)\n"
        "print('ready', flush=True)\n" + child
    )
    launch = run([sys.executable, "-c", parent], tmp_path, 2.0, {})
    assert "ready" in launch.output
    assert launch.returncode is None
    assert launch.seconds < 10
    assert not launch.immortal


def test_a_process_left_behind_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.GRACE", 0.5)
    daemon = f"import os, time; assert os.environ[{TAG!r}]; time.sleep(600)"
    parent = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {daemon!r}], start_new_session=True)\n"
        "time.sleep(0.3)"
    )
    launch = run([sys.executable, "-c", parent], tmp_path, 20.0, {})
    assert launch.returncode == 0
    assert [line for line in launch.left if "time.sleep(600)" in line]
    with pytest.raises(AssertionError, match="alive after the launch"):
        assert_clean(launch)
    assert not launch.immortal
