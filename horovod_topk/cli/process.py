"""A command with a time limit; none of its processes is left behind, however it ends."""

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

TAIL_LINES = 40  # of a command's output, shown where it fails
GRACE_SECONDS = 15.0  # for horovodrun to end its ranks before they are killed
PREFIX = re.compile(r"^\[(?:\d+,)?(\d+)\]<std(?:out|err)>: ?")  # horovodrun's, on Gloo and on MPI


@dataclass(frozen=True)
class Ended:
    """How a command has ended."""

    status: int  # its exit status
    late: bool  # whether it was ended because its time was over
    tail: str  # the last lines of its output, of the ranks' where they have printed anything

    def problem(self, limit_seconds: float) -> str | None:
        """What went wrong, in a few words; None: nothing."""
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
) -> Ended:
    """Run a command until it ends, or until its time is over.

    Args:
        command: program and arguments.
        limit_seconds: the command and all that it started is ended when it takes longer.
        on_line: called with every line of its output, with its end, while it runs.
        folder: in which it runs; None: the current one.
        environment: variables beside those of this process.
    """
    process = subprocess.Popen(
        list(command),
        cwd=folder,
        env=os.environ | dict(environment or {}),
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
        tail = "".join(_read(process, on_line))
        status = process.wait()
    finally:
        limit.cancel()
        end_with_descendants(process)
    return Ended(status, late.is_set(), tail)


def unprefixed(line: str) -> str:
    """A line of output without what horovodrun puts before it."""
    return PREFIX.sub("", line)


def rank_of(line: str) -> int | None:
    """The rank whose output a line is; None: horovodrun does not say."""
    found = PREFIX.match(line)
    return None if found is None else int(found[1])


def _read(process: subprocess.Popen[bytes], on_line: Callable[[str], None] | None) -> deque[str]:
    """Read the output until the last process has closed it; return the last lines."""
    assert process.stdout is not None
    all_lines, of_ranks = deque[str](maxlen=TAIL_LINES), deque[str](maxlen=TAIL_LINES)
    # newline="": a progress bar rewrites its line with \r, which has to stay one.
    for line in io.TextIOWrapper(process.stdout, errors="replace", newline=""):
        if on_line is not None:
            on_line(line)
        if not line.endswith("\r"):
            (all_lines if rank_of(line) is None else of_ranks).append(unprefixed(line))
    return of_ranks or all_lines  # a launcher prints pages about a rank that has failed


def end_with_descendants(process: subprocess.Popen[bytes]) -> None:
    """End a process that still runs and all that it started: first politely, then for certain."""
    if process.poll() is not None:
        return
    with contextlib.suppress(psutil.NoSuchProcess):
        descendants = psutil.Process(process.pid).children(recursive=True)
        process.terminate()  # horovodrun passes it on to its ranks
        for survivor in psutil.wait_procs(descendants, timeout=GRACE_SECONDS)[1]:
            survivor.kill()
    process.kill()
    process.wait()
