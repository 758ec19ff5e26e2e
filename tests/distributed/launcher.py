"""Run pytest on real ranks under `horovodrun`, within a time limit, and leave nothing behind.

A launch is tagged by an environment variable that every process below it inherits, so that ranks,
launchers and Open MPI's daemons are found in /proc whatever session they moved to.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
RANKS = HERE / "ranks"
REPOSITORY = Path(__file__).parents[2]
HOROVODRUN = sys.executable, "-m", "horovod_topk.cli.horovodrun"
TORCHRUN = sys.executable, "-m", "torch.distributed.run", "--standalone"
WITHOUT_TENSORFLOW = Path(__file__).parent / "without_tensorflow"

TAG = "HOROVOD_TOPK_TEST_LAUNCH"
FOLDER = "HOROVOD_TOPK_TEST_FOLDER"  # where ranks write their outcomes; read by meeting.py
LAUNCHED_AS = "HOROVOD_TOPK_TEST_LAUNCHED_AS"  # tier and controller; read by meeting.py
GRACE = 10.0  # seconds for a launch's processes to end by themselves after it, or once killed

SETTINGS = {
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "20",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "60",  # a collective that some rank never joins fails
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "120",
    "OMP_NUM_THREADS": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",  # with more ranks than cores, waiting ranks starve others
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # loading hypothesis costs each rank a second
    "PYTHONUNBUFFERED": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


@dataclass(frozen=True)
class Outcome:
    """How one case ended on one rank."""

    rank: int
    case: str
    passed: bool
    seconds: float
    report: str  # traceback and captured output; empty if passed


@dataclass(frozen=True)
class Launch:
    """What became of a launch."""

    returncode: int | None  # None: killed at the time limit
    seconds: float
    output: str
    outcomes: tuple[Outcome, ...]
    left: tuple[str, ...]  # processes that had to be killed after the launch was over
    immortal: tuple[str, ...]  # processes that outlived even that

    def failures(self) -> list[Outcome]:
        """Cases that failed, earliest first."""
        return [outcome for outcome in self.outcomes if not outcome.passed]

    def passed_cases(self, rank: int = 0) -> list[str]:
        """Cases that passed on one rank."""
        return [o.case for o in self.outcomes if o.rank == rank and o.passed]

    def assert_clean(self) -> None:
        """No process of the launch was there after it."""
        assert not self.immortal, self.immortal
        assert not self.left, f"alive after the launch ended: {self.left}"

    def assert_all_passed(self, size: int) -> None:
        """Every rank passed the same cases, and at least one."""
        assert self.returncode == 0, self.describe()
        assert not self.failures(), self.describe()
        passed = [self.passed_cases(rank) for rank in range(size)]
        assert passed[0], self.describe()
        assert all(cases == passed[0] for cases in passed), self.describe()

    def describe(self, most: int = 6) -> str:
        """The first failing cases in full, then the end of what the launch printed."""
        end = "killed at the time limit" if self.returncode is None else f"rc {self.returncode}"
        failing: dict[str, list[Outcome]] = {}
        for outcome in self.failures():
            failing.setdefault(outcome.case, []).append(outcome)
        lines = [f"launch: {end} after {self.seconds:.0f} s, {len(failing)} cases failed"]
        for position, (case, outcomes) in enumerate(failing.items()):
            ranks = ", ".join(str(o.rank) for o in outcomes)
            lines.append(f"=== {case} on rank {ranks} ({outcomes[0].seconds:.1f} s)")
            if position < most:
                lines += list(dict.fromkeys(o.report for o in outcomes))
        return "\n".join([*lines, "=== end of the launch's output", self.output[-4000:]])


def launch_ranks(
    cases: Sequence[Path],
    *,
    size: int,
    controller: str,
    folder: Path,
    limit: float,
    arguments: Sequence[str] = (),
    settings: Mapping[str, str] | None = None,
    hosts: str | None = None,
    tier: str = "all",
) -> Launch:
    """Run case files on `size` ranks, with Horovod's "gloo" or "mpi" controller, or "torchrun".

    hosts: as `horovodrun -H` takes them. Gloo takes two names of this machine for two hosts.
    tier: which of the cases; see launches.py.
    """
    own = {LAUNCHED_AS: f"{tier} {controller}"}
    if controller == "torchrun":
        command = [*TORCHRUN, f"--nproc-per-node={size}", *_pytest(cases, arguments)]
        return run(command, folder, limit, {**own, **(settings or {})})
    horovodrun = [*HOROVODRUN, "-np", str(size), f"--{controller}"]
    horovodrun += [] if hosts is None else ["-H", hosts]
    command = [*horovodrun, sys.executable, *_pytest(cases, arguments)]
    own["HOROVOD_CYCLE_TIME"] = "3"  # ms; ranks wake up each time, most often for nothing
    return run(command, folder, limit, {**own, **(settings or {})})


def launch_alone(cases: Sequence[Path], *, folder: Path, limit: float, tier: str = "all") -> Launch:
    """Run case files in one process that no launcher started: world size 1."""
    alone = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
    alone[LAUNCHED_AS] = f"{tier} alone"
    places = ("RANK", "LOCAL_RANK", "CROSS_RANK"), ("SIZE", "LOCAL_SIZE", "CROSS_SIZE")
    for value, names in zip(("0", "1"), places, strict=True):
        alone |= {f"HOROVOD_{name}": value for name in names}
    return run([sys.executable, *_pytest(cases, ())], folder, limit, alone)


def run(command: Sequence[str], folder: Path, limit: float, settings: Mapping[str, str]) -> Launch:
    """Run a command and everything below it; no process of it is alive afterwards."""
    tag, began = uuid.uuid4().hex, time.monotonic()
    printed = folder / "output.txt"
    with printed.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=_environment(tag, folder, settings),
            cwd=REPOSITORY,
        )
        try:
            returncode = _wait(process, limit)
            left = _describe(_lingering(tag)) if returncode is not None else ()
        finally:
            immortal = _kill_all(tag, process)
    text = printed.read_text(errors="replace")
    seconds = time.monotonic() - began
    return Launch(returncode, seconds, text, _outcomes(folder), left, immortal)


def tagged(tag: str) -> list[int]:
    """Ids of the living processes of a launch."""
    needle, found = f"{TAG}={tag}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and needle in _environ(int(entry.name)):
            found.append(int(entry.name))
    return found


def _pytest(cases: Sequence[Path], arguments: Sequence[str]) -> list[str]:
    ini = str(RANKS / "pytest.ini")
    plugins = ["--color=no", "-p", "pytest_timeout", "-p", "no:cacheprovider"]
    return ["-m", "pytest", "-c", ini, *plugins, "-q", *arguments, *map(str, cases)]


def _environment(tag: str, folder: Path, settings: Mapping[str, str]) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD_", "PYTEST_"))}
    compared = REPOSITORY / "scripts", REPOSITORY / "examples"  # simulated ranks with real ones
    folders = WITHOUT_TENSORFLOW, REPOSITORY, *compared, HERE, HERE.parent
    modules = *map(str, folders), os.environ.get("PYTHONPATH", "")
    programs = str(Path(sys.executable).parent), os.environ.get("PATH", "")
    own = {TAG: tag, FOLDER: str(folder)}
    own |= {"PYTHONPATH": os.pathsep.join(filter(None, modules)), "PATH": os.pathsep.join(programs)}
    return {**inherited, **SETTINGS, **settings, **own}


def _wait(process: subprocess.Popen[bytes], limit: float) -> int | None:
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None


def _lingering(tag: str) -> list[int]:
    """Processes still there after the grace period."""
    deadline = time.monotonic() + GRACE
    while (alive := tagged(tag)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return alive


def _kill_all(tag: str, process: subprocess.Popen[bytes]) -> tuple[str, ...]:
    """Kill until none is left: a process killed may have started another."""
    deadline = time.monotonic() + GRACE
    while (alive := tagged(tag)) and time.monotonic() < deadline:
        for pid in alive:
            _kill(pid)
        process.poll()  # reaps it: a zombie keeps nothing, but is no proof either
        time.sleep(0.05)
    process.wait()
    return _describe(alive)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _environ(pid: int) -> bytes:
    """A process's environment; empty for zombies and for processes of other users."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def _describe(pids: Sequence[int]) -> tuple[str, ...]:
    return tuple(f"{pid}: {_command(pid)}" for pid in pids)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return "(gone)"


def _outcomes(folder: Path) -> tuple[Outcome, ...]:
    """All ranks' outcomes, case by case in the order in which they ran."""
    found = []
    for path in sorted(folder.glob("rank-*.jsonl")):
        lines = path.read_text().splitlines()
        found += [(position, Outcome(**json.loads(line))) for position, line in enumerate(lines)]
    return tuple(outcome for _, outcome in sorted(found, key=lambda item: item[0]))
