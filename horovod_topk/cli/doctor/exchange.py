"""A real exchange between two ranks of this machine, within a time limit."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence

from horovod_topk.cli.doctor.finding import Finding

NAME = "two ranks exchange"
MARK = "topkef-doctor:"  # prefix of the line in which a rank reports
LIMIT_SECONDS = 90.0
GRACE_SECONDS = 10.0  # for horovodrun to end its ranks
SHOWN = 3  # last lines of a failed launch's output to show
CURES = {
    "gloo": "horovodrun -np 2 --gloo --verbose python -m horovod_topk.cli.doctor.rank says more; "
    "try --network-interfaces lo",
    "mpi": "mpirun -np 2 hostname has to work first; then horovodrun -np 2 --mpi --verbose python "
    "-m horovod_topk.cli.doctor.rank says more",
    "torch's gloo": "torchrun --nproc-per-node 2 -m horovod_topk.cli.doctor.rank says more; "
    "try GLOO_SOCKET_IFNAME=lo",
}


def meet(controllers: Sequence[str], limit: float = LIMIT_SECONDS) -> Finding:
    """Exchange through the first controller that Horovod has."""
    program = shutil.which("horovodrun")
    if program is None:
        cure = "put the environment's bin on PATH: source .venv/bin/activate"
        return Finding(NAME, "not tried: horovodrun is not on PATH", cure)
    if not controllers:
        return Finding(NAME, "not tried: Horovod has no controller", "see controllers above")
    controller = controllers[0]
    code = [sys.executable, "-m", "horovod_topk.cli.doctor.rank", str(int(limit))]
    status, printed = run([program, "-np", "2", f"--{controller}", *code], limit)
    return read(status, printed, controller, limit)


def meet_without_horovod(limit: float = LIMIT_SECONDS) -> Finding:
    """Exchange through torch.distributed, as DistributedDataParallel does."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    code = ["-m", "horovod_topk.cli.doctor.rank", str(int(limit))]
    status, printed = run([*torchrun, *code], limit)
    return read(status, printed, "torch's gloo", limit)


def read(status: int | None, printed: str, controller: str, limit: float) -> Finding:
    """The finding from a launch's exit status and output. status: None if it was too slow."""
    marked = [line.split(MARK, 1)[1].strip() for line in printed.splitlines() if MARK in line]
    if status == 0 and marked:
        return Finding(NAME, f"{marked[0]}, on {controller}")
    cure = CURES[controller]
    if status is None:
        return Finding(NAME, f"failed: not over after {limit:g} s", cure)
    last = " | ".join(line.strip() for line in printed.splitlines()[-SHOWN:])
    return Finding(NAME, f"failed: exit status {status}: {last}", cure)


def run(command: Sequence[str], limit: float) -> tuple[int | None, str]:
    """Run a command; return its exit status, None if it took too long, and its output.

    All its processes are ended. Ranks also end themselves (`horovod_topk.cli.doctor.rank`), in case
    they have left the process group.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=limit)
        return process.returncode, printed
    except subprocess.TimeoutExpired:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=GRACE_SECONDS)
        return None, ""
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
