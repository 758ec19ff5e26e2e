"""The room that a cluster lives in: namespaces that end when the process that made them ends.

Nothing has to be cleaned up. The room's first process reads a pipe whose other end only we hold.
However we end, by an exception, a signal or `kill -9`, the kernel closes our end; that process
reads the end of its input and exits; and as it was the first of its process namespace, the kernel
kills all others in it. Links, mounts and the files below the mounts are the room's own, so
they go with its last process.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from cluster.needs import NAMESPACES, ClusterError, search_path

END_SECONDS = 30.0
READY = b"ready\n"

# /run has what the room writes; the others would be left behind or used by what runs in it.
# Its first process is handed those whose parent is gone, and waits for none of them: with SIGCHLD
# ignored the kernel does.
SETUP = """
set -eu
for folder in /run /dev/shm /etc/ssh; do mount -t tmpfs -o mode=755 room $folder; done
chmod 1777 /dev/shm
if [ -d ~/.ssh ]; then mount -t tmpfs -o mode=700 room ~/.ssh; fi
mkdir -p /run/sshd /run/lock
mkdir -m 1777 /run/tmp
ip link set lo up
echo ready
exec env --ignore-signal=CHLD cat >/dev/null
"""


class Room:
    """Namespaces for mounts, processes, the network and all else a cluster is made of."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            ["unshare", *NAMESPACES, "--fork", "--mount-proc", "sh", "-c", SETUP],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(),
            start_new_session=True,  # Ctrl-C is ours to hear
        )
        try:
            self.pid = first_process(self._process, "a room of its own")
        except BaseException:
            self.close()
            raise

    def path(self, inside: str) -> Path:
        """Where a file of the room can be reached from outside."""
        return Path(f"/proc/{self.pid}/root") / inside.lstrip("/")

    def enter(self) -> list[str]:
        """What to put before a command, for it to run in the room."""
        return enter(self.pid)

    def check(self, command: Sequence[str]) -> None:
        """Run a command in the room."""
        check([*self.enter(), *command])

    def close(self) -> None:
        """End every process in it, and with them the room. Idempotent."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait(END_SECONDS)
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()


def enter(pid: int) -> list[str]:
    """What to put before a command, for it to run in the namespaces that a process is in.

    Only children enter a namespace of processes. The shell waits for the child, and not nsenter,
    which stops for good when the child is stopped and continued.
    """
    into = ["nsenter", "--no-fork", "--target", str(pid), *NAMESPACES, "--"]
    return [*into, "sh", "-c", '"$@"; exit $?', "sh"]


def environment() -> dict[str, str]:
    """For the programs that build a cluster: this process's, with root's PATH."""
    return os.environ | {"PATH": search_path()}


def check(command: Sequence[str]) -> None:
    """Run a command that takes a moment."""
    done = subprocess.run(
        command, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        raise ClusterError(f"{' '.join(command)}: {said or f'exit status {done.returncode}'}")


def first_process(launcher: subprocess.Popen[bytes], what: str) -> int:
    """The id, outside, of the first process in the namespaces that a command made.

    That is a descendant of the command, whose id is 1 within; it has to say that it is ready.

    Raises:
        ClusterError: it ended instead; with what it said.
    """
    assert launcher.stdout is not None and launcher.stderr is not None
    if launcher.stdout.readline() != READY:
        said = " ".join(launcher.stderr.read().decode(errors="replace").split())
        raise ClusterError(f"{what} could not be made: {said}")
    pid = launcher.pid
    while not _is_first(pid):
        pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
    return pid


def _is_first(pid: int) -> bool:
    """Whether a process is the first of the innermost namespace that it is in."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (ids,) = [line.split()[1:] for line in lines if line.startswith("NSpid:")]
    return ids[-1] == "1"
