"""`scripts/netlab`: what runs on its hosts, and what is left of it, however it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from skipping import skip_without

pytestmark = [pytest.mark.cluster, pytest.mark.tools, pytest.mark.slow, pytest.mark.timeout(120)]

REPOSITORY = Path(__file__).parents[2]
NETLAB = REPOSITORY / "scripts" / "netlab"
DIGITS = (sys.executable, "examples/pytorch_digits.py", "--compression", "topk", "--steps", "4")
GRACE = 30.0  # seconds for the processes of a cluster to be gone


@contextmanager
def netlab(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, NETLAB, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=REPOSITORY,
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()  # or a test that failed would wait for it


def everything_below(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def sleeping(process: subprocess.Popen[str], count: int) -> list[psutil.Process]:
    """Everything below, once so many of it sleep: who has said "up" may not have come to that."""
    deadline = time.monotonic() + GRACE
    while True:
        below = everything_below(process)
        found = sum(command_of(each) == ["sleep", "600"] for each in below)
        if found == count or time.monotonic() > deadline:
            assert found == count
            return below
        time.sleep(0.05)


def command_of(process: psutil.Process) -> list[str]:
    """Nothing if it has ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def assert_gone(processes: Sequence[psutil.Process]) -> None:
    assert not psutil.wait_procs(processes, timeout=GRACE)[1]


@pytest.mark.parametrize(("controller", "slots"), [("gloo", 2), ("mpi", 1)], ids=["gloo", "mpi"])
def test_digits_train_across_hosts(controller: str, slots: int, tmp_path: Path) -> None:
    skip_without("lossy")
    result = tmp_path / "run.json"
    cluster = "--hosts", 2, "--slots", slots, "--rate", "1gbit", "--loss", 0.001
    horovodrun = "horovodrun", f"--{controller}", *DIGITS, "--json", result
    with netlab(*cluster, "--", *horovodrun) as process:
        printed = process.communicate(timeout=100)[0]
    assert process.returncode == 0, printed
    run = json.loads(result.read_text())
    assert run["config"]["ranks"] == 2 * slots
    assert run["history"]["step"] == [4]


@pytest.mark.parametrize(
    ("number", "options"),
    [
        (signal.SIGINT, ()),
        (signal.SIGTERM, ()),
        (signal.SIGKILL, ()),
        (signal.SIGKILL, ("--delay", "5ms")),
    ],
)
def test_interrupted_it_leaves_no_process(number: signal.Signals, options: tuple[str, ...]) -> None:
    if "--delay" in options:
        skip_without("delayed")
    away = "ssh host2 'echo up; sleep 600' & ssh host3 'echo up; sleep 600' & sleep 600"
    with netlab("--hosts", 3, *options, "--", "bash", "-c", away) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["up\n", "up\n"]
        below = sleeping(process, 3)
        process.send_signal(number)
        status = process.wait(GRACE)
    assert status == (-signal.SIGKILL if number == signal.SIGKILL else 130)
    assert_gone(below)


def test_the_command_s_status_is_its_own() -> None:
    with netlab("--hosts", 2, "--", "bash", "-c", "ssh host2 hostname; exit 7") as process:
        assert process.communicate(timeout=90)[0] == "host2\n"
    assert process.returncode == 7


@pytest.mark.parametrize(
    "arguments", [("--rate", "fast"), ("--loss", "1.5"), ("--delay", "50"), ("--hosts", "0")]
)
def test_settings_that_make_no_cluster_are_refused(arguments: tuple[str, str]) -> None:
    with netlab(*arguments, "--", "true") as process:
        printed = process.communicate(timeout=60)[0]
    assert process.returncode == 2
    assert printed.startswith("netlab: ") and arguments[1] in printed


def test_a_process_left_behind_would_be_noticed() -> None:
    with subprocess.Popen(["sleep", "600"]) as left:
        began = time.monotonic()
        with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError):
            patch.setitem(globals(), "GRACE", 0.2)
            assert_gone([psutil.Process(left.pid)])
        left.kill()
    assert time.monotonic() - began < GRACE
