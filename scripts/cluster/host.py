"""One host: namespaces within the room, one end of a link, and an sshd."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.link import Link
from cluster.needs import NAMESPACES, ClusterError, variables
from cluster.room import END_SECONDS, Room, check, enter, environment, first_process

BRIDGE = "switch"
INTERFACE = "eth0"  # a host's, by that name on every host
NETWORK = "10.77.0.{number}"

SETUP = """
set -eu
hostname {name}
mount -t sysfs host /sys
ip link set lo up
{sshd} -f /etc/ssh/sshd_config -E /run/{name}.sshd.log
echo ready
exec env --ignore-signal=CHLD sleep infinity
"""


class Host:
    """A host of a cluster."""

    def __init__(self, room: Room, number: int, link: Link, sshd: str) -> None:
        self.name, self.address = name_of(number), address_of(number)
        self._room, self._port = room, port_of(number)
        setup = SETUP.format(name=self.name, sshd=sshd)
        inner = ["unshare", *NAMESPACES, "--fork", "--mount-proc", "sh", "-c", setup]
        self._process = subprocess.Popen(
            [*room.enter(), *inner],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(),
            start_new_session=True,
        )
        self.pid = first_process(self._process, self.name)
        self._connect(link)

    def _connect(self, link: Link) -> None:
        """Plug it in. Both ends are shaped: each shapes what leaves it."""
        # Only the network's namespace is entered: the host's process id is known outside alone.
        switch = ["nsenter", "--target", str(self._room.pid), "--net", "--", "ip", "link"]
        card = ["name", INTERFACE, "netns", str(self.pid)]
        if link.delay:  # the other end is `cluster.delay`
            check([*switch, "set", self._port, *card])
        else:
            check([*switch, "add", self._port, "type", "veth", "peer", *card])
            check([*switch, "set", self._port, "master", BRIDGE, "up"])
        if bundles := link.bundles():
            self.check(["ip", "link", "set", INTERFACE, *bundles])
        self.check(["ip", "address", "add", f"{self.address}/24", "dev", INTERFACE])
        self.check(["ip", "link", "set", INTERFACE, "up"])
        if shaping := link.shaping():
            self.check(["tc", "qdisc", "add", "dev", INTERFACE, "root", *shaping])
            if not link.delay:
                self._room.check(["tc", "qdisc", "add", "dev", self._port, "root", *shaping])
        if dropping := link.dropping():
            self.check(["iptables", *dropping])

    def enter(self, folder: Path | None = None) -> list[str]:
        """What to put before a command, for it to run here, in this or another folder."""
        return [*enter(self.pid), "env", f"--chdir={folder or Path.cwd()}"]

    def start(
        self, command: Sequence[str], settings: Mapping[str, str] | None = None, **rest: Any
    ) -> subprocess.Popen[bytes]:
        """Start a command here, in the current folder."""
        env = os.environ | variables() | dict(settings or {})
        return subprocess.Popen([*self.enter(), *command], env=env, **rest)

    def run(
        self,
        command: Sequence[str],
        settings: Mapping[str, str] | None = None,
        *,
        limit_seconds: float,
    ) -> str:
        """Run a command as `start` does; what it printed.

        Raises:
            ClusterError: it failed, or took longer; with the end of what it printed. Whatever it
                left running is killed with the cluster.
        """
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = self.start(command, settings, stdin=subprocess.DEVNULL, **output)
        try:
            printed, why = process.communicate(timeout=limit_seconds)[0], ""
        except subprocess.TimeoutExpired as late:
            process.kill()
            printed, why = late.output or b"", f"took longer than {limit_seconds:g} s"
        if process.returncode:
            why = f"exit status {process.returncode}"
        text = printed.decode(errors="replace")
        if why:
            raise ClusterError(f"{' '.join(command)}: {why}\n{text[-4000:]}")
        return text

    def check(self, command: Sequence[str]) -> None:
        """Run a command here that takes a moment."""
        check([*self.enter(Path("/")), *command])

    def lose_power(self) -> None:
        """Stop at once, and say nothing to the others. Idempotent."""
        with contextlib.suppress(ClusterError):  # it is gone since it was done before
            self.check(["ip", "link", "set", INTERFACE, "down"])
        self.crash()

    def crash(self) -> None:
        """End all its processes; the kernel closes their connections. Idempotent."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def wait(self) -> None:
        """Until its last process has ended."""
        self._process.wait(END_SECONDS)
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()


def name_of(number: int) -> str:
    """Of the host."""
    return f"host{number}"


def port_of(number: int) -> str:
    """The switch's, for the host."""
    return f"port{number}"


def address_of(number: int) -> str:
    """Of the host."""
    return NETWORK.format(number=number)
