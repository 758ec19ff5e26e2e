"""Runs a command with a time limit, and ends all its processes."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

TAIL_LINES = 40  # last lines of a command's output, shown if it fails
POLL_SECONDS = 0.5
GRACE_SECONDS = 15.0  # for horovodrun to end its ranks before they are killed
PREFIX = re.compile(r"^\[(?:\d+,)?(\d+)\]<std(?:out|err)>: ?")  # horovodrun's, on Gloo and MPI


@dataclass(frozen=True)
class Ended:
    """The outcome of a command."""

    status: int  # its exit status
    late: bool  # whether it was ended at the time limit
    tail: str  # the last lines of its output, or of the ranks' output if there is any

    def problem(self, limit_seconds: float) -> str | None:
        """What went wrong, in a few words; None: nothing did."""
        if self.late:
            return f"took longer than {limit_seconds:g} s"
        return f"exit status {self.status}" if self.status else None


def follow(
    command: Sequence[str],
    *,
    limit_seconds: float,
    on_line: Callable[[str], None] | None = None,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    enough: Callable[[], bool] | None = None,
) -> Ended:
    """Run a command until it ends, or until the time limit.

    Args:
        limit_seconds: the command and all its processes are ended if it takes longer.
        on_line: called with every line of its output, line end included, while it runs.
        enough: called twice a second; the command is ended once it returns True.
    """
    process = subprocess.Popen(
        list(command),
        cwd=folder,
        env=os.environ | dict(environment or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C only reaches this process, which then ends the run
    )
    late = threading.Event()

    def end_late() -> None:
        late.set()
        end_with_descendants(process)

    limit = threading.Timer(limit_seconds, end_late)
    limit.start()
    done = threading.Event()

    def end_early() -> None:
        while enough is not None and not done.wait(POLL_SECONDS):
            if enough():
                end_with_descendants(process)
                return

    watcher = threading.Thread(target=end_early, daemon=True)
    watcher.start()
    try:
        tail = "".join(_read(process, on_line))
        status = process.wait()
    finally:
        limit.cancel()
        done.set()
        watcher.join()
        end_with_descendants(process)
    return Ended(status, late.is_set(), tail)


def unprefixed(line: str) -> str:
    """A line of output without horovodrun's prefix."""
    return PREFIX.sub("", line)


def rank_of(line: str) -> int | None:
    """The rank that printed a line of output; None: the line has no prefix."""
    found = PREFIX.match(line)
    return None if found is None else int(found[1])


def _read(process: subprocess.Popen[bytes], on_line: Callable[[str], None] | None) -> deque[str]:
    """Read the output until the last process has closed it; return the last lines."""
    assert process.stdout is not None
    all_lines, of_ranks = deque[str](maxlen=TAIL_LINES), deque[str](maxlen=TAIL_LINES)
    # newline="": a progress bar rewrites its line with \r, which must not become \n.
    for line in io.TextIOWrapper(process.stdout, errors="replace", newline=""):
        if on_line is not None:
            on_line(line)
        if not line.endswith("\r"):
            (all_lines if rank_of(line) is None else of_ranks).append(unprefixed(line))
    return of_ranks or all_lines  # launchers print many lines about a failed rank


def end_with_descendants(process: subprocess.Popen[bytes]) -> None:
    """End a process and its descendants: first by a signal that asks, then by kill."""
    if process.poll() is not None:
        return
    with contextlib.suppress(psutil.NoSuchProcess):
        descendants = psutil.Process(process.pid).children(recursive=True)
        process.terminate()  # horovodrun passes it on to its ranks
        for survivor in psutil.wait_procs(descendants, timeout=GRACE_SECONDS)[1]:
            survivor.kill()
    process.kill()
    process.wait()
