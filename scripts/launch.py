"""Runs an example on several ranks of this machine, within a time limit.

However a run ends, by itself, at its limit or by Ctrl-C, none of its processes is left behind.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
TAIL_LINES = 40  # of a failed run's output, shown with the failure
GRACE_SECONDS = 15.0  # for horovodrun to end its ranks before they are killed


class RunFailedError(Exception):
    """A run ended badly; the message has the command, why, and the end of its output."""


def python_path() -> str:
    """What a rank imports: this package, these scripts, and the examples' models and data."""
    return os.pathsep.join(str(ROOT / each) for each in ("", "scripts", "examples"))


def command_line(script: str, arguments: Sequence[str], ranks: int) -> str:
    """What a user would type, in the repository's root."""
    return " ".join(["horovodrun", "-np", str(ranks), "--gloo", "python", script, *arguments])


def run(
    script: str,
    arguments: Sequence[str],
    *,
    ranks: int = 2,
    limit_seconds: float,
    echo: bool = False,
) -> None:
    """Runs `script`, a path below the repository's root, under `horovodrun --gloo`.

    Args:
        script: the example.
        arguments: its own.
        ranks: how many processes, all on this machine.
        limit_seconds: the run is ended when it takes longer.
        echo: pass its output on to stdout while it runs.

    Raises:
        RunFailedError: its exit status is not 0, or it ran into the limit.
    """
    horovodrun = Path(sys.executable).with_name("horovodrun")
    command = [horovodrun, "-np", str(ranks), "--gloo", sys.executable, script, *arguments]
    process = subprocess.Popen(
        list(map(str, command)),
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the run
    )
    late = threading.Event()

    def end_late() -> None:
        late.set()
        end_with_descendants(process)

    limit = threading.Timer(limit_seconds, end_late)
    limit.start()
    try:
        tail = _follow(process, echo=echo)
        status = process.wait()
    finally:
        limit.cancel()
        end_with_descendants(process)
    if late.is_set() or status:
        why = f"took longer than {limit_seconds:g} s" if late.is_set() else f"exit status {status}"
        raise RunFailedError(f"{command_line(script, arguments, ranks)}: {why}\n{''.join(tail)}")


def _follow(process: subprocess.Popen[bytes], *, echo: bool) -> deque[str]:
    """Reads the output until the last process has closed it; returns the last lines."""
    assert process.stdout is not None
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    # newline="": a progress bar rewrites its line with \r, which has to stay one.
    for line in io.TextIOWrapper(process.stdout, errors="replace", newline=""):
        text = re.sub(r"^\[\d+\]<std(out|err)>:", "", line)  # horovodrun's prefix
        if echo:
            print(text, end="", flush=True)
        if not line.endswith("\r"):
            tail.append(text)
    return tail


def end_with_descendants(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that still runs and all that it started: first politely, then for certain."""
    if process.poll() is not None:
        return
    with contextlib.suppress(psutil.NoSuchProcess):
        descendants = psutil.Process(process.pid).children(recursive=True)
        process.terminate()  # horovodrun passes it on to its ranks
        for survivor in psutil.wait_procs(descendants, timeout=GRACE_SECONDS)[1]:
            survivor.kill()
    process.kill()
    process.wait()
