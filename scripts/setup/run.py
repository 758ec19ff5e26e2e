"""Run a command into the log, show that it is alive, and put its failure in one line."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

# Below this a failure that names no cause is put down to the disk: where the log cannot grow any
# more, the message that says so is lost as well.
FULL_DISK_BYTES = 32 << 20
POLL_SECONDS = 1.0
TAIL_BYTES = 64 << 10  # of the log: room for the warnings after the last percentage
SIGN_OF_LIFE_SECONDS = 30  # where stdout is no terminal; on a terminal, every poll


class SetupError(Exception):
    """The set-up cannot go on. The message is the one line the user sees, with the cure."""


class Console:
    """Progress on stdout: a line a step with the time since the start, and signs of life."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._live = sys.stdout.isatty()
        self._step = ""
        self._shown = self._started

    def step(self, text: str) -> None:
        """Announce the step that begins now."""
        self._step = text
        self._shown = time.monotonic()
        self._print(f"{self._elapsed()} {text}\n")

    def note(self, text: str) -> None:
        """Tell a result of the step under way."""
        self._print(f"{' ' * len(self._elapsed())}   {text}\n")

    def tick(self, detail: str = "") -> None:
        """Show that the step under way still runs; `detail` says how far it is."""
        quiet = 0 if self._live else SIGN_OF_LIFE_SECONDS
        if time.monotonic() - self._shown < quiet:
            return
        self._shown = time.monotonic()
        self._print(f"{self._elapsed()} ... {self._step} {detail}" + ("" if self._live else "\n"))

    def _elapsed(self) -> str:
        return f"[{time.monotonic() - self._started:4.0f} s]"

    def _print(self, text: str) -> None:
        # On a terminal a sign of life stays on its line until the next line wipes it.
        print(("\r\x1b[K" if self._live else "") + text, end="", flush=True)


class Runner:
    """Runs commands in one environment, with all their output in one log file."""

    def __init__(self, log: Path, env: Mapping[str, str], console: Console) -> None:
        self.log = log
        self.env = dict(env)
        self.console = console
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("")

    def check(
        self,
        command: Sequence[object],
        failure: str,
        *,
        env: Mapping[str, str] | None = None,
        error: type[SetupError] = SetupError,
    ) -> str:
        """Run `command` and return its output; if it fails, raise `error`: `failure` and why."""
        start = self.log.stat().st_size
        status = self._wait(self._start(command, self.env if env is None else env))
        return self._output(status, start, failure, error)

    def _output(
        self, status: int, start: int, failure: str, error: type[SetupError] = SetupError
    ) -> str:
        """Return what a command has written to the log from byte `start` on, or `error`."""
        output = _read(self.log, start)
        if status:
            places = (self.log.parent, Path(tempfile.gettempdir()))
            cause = explain(output, status, disk_full=any(map(is_full, places)))
            raise error(f"{failure}: {cause} (log: {self.log})")
        return output

    @contextlib.contextmanager
    def beside(self, command: Sequence[object], failure: str) -> Iterator[None]:
        """Run `command` while the block runs, with a log of its own; raise if it fails."""
        other = Runner(self.log.with_suffix(".2.log"), self.env, self.console)
        process = other._start(command, self.env)
        with _ended_with_us(process):
            yield
        other._output(other._wait(process), 0, failure)

    def _start(self, command: Sequence[object], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            log.write(f"\n$ {' '.join(map(str, command))}\n".encode())
            log.flush()
            # A session of its own, so that a whole tree of compilers can be ended at once.
            return subprocess.Popen(
                list(map(str, command)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        with _ended_with_us(process):
            while True:
                try:
                    return process.wait(timeout=POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    self.console.tick(percent_done(_read(self.log, -TAIL_BYTES)))


@contextlib.contextmanager
def _ended_with_us(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """End `process` and all it started if the block is left by an exception (Ctrl-C, say)."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()
        raise


def _read(path: Path, start: int) -> str:
    """The file from byte `start` on, or its last `-start` bytes."""
    with path.open("rb") as file:
        file.seek(start if start >= 0 else max(0, path.stat().st_size + start))
        return file.read().decode(errors="replace")


def percent_done(output: str) -> str:
    """How far make says it is, from the end of its output; empty when it says nothing."""
    found = re.findall(r"\[ *(\d+%)\]", output)
    return found[-1] if found else ""


def is_full(place: Path) -> bool:
    """Whether the disk behind `place` has no room left worth the name."""
    return shutil.disk_usage(place).free < FULL_DISK_BYTES


def explain(output: str, status: int, *, disk_full: bool = False) -> str:
    """Why a command that printed `output` and ended with `status` failed, in one line."""
    if disk_full or re.search(r"No space left on device|Disk quota exceeded", output):
        return "the disk is full"
    # pip retries, then reports a package it could not even look up as one that does not exist.
    unreachable = r"Max retries exceeded|Read timed out|Connection aborted|Network is unreachable"
    if re.search(r"connection broken by .*(Error|Timeout)|" + unreachable, output):
        return "the package registry cannot be reached: look at the network and `pip config list`"
    missing = re.search(r"No matching distribution found for (\S+)", output)
    if missing:
        return f"the package registry has no {missing[1]} for this Python and processor"
    if status == -signal.SIGKILL or re.search(r"Killed signal|out of memory", output):
        return "out of memory; run it again with HOROVOD_TOPK_JOBS=1"
    # CMake says where in one line, and what in the lines up to an empty one.
    named = r"^.*(?:\berror: |ERROR: |\w+Error: |CMake Error(?:.*:\n(?:.*\S.*\n)*)?).*$"
    errors = re.findall(named, output, re.MULTILINE)
    lines = errors[:1] or output.strip().splitlines()[-1:] or [f"exit status {status}"]
    # The path of a module of CMake's own would take up the line.
    line = re.sub(r"(CMake Error at )/\S*/", r"\1", " ".join(lines[0].split()))
    return line[:200]
