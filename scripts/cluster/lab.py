"""The cluster: a room, a switch and hosts."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from cluster import ssh
from cluster.errors import ClusterError
from cluster.horovod import complete
from cluster.host import BRIDGE, Host, address_of, name_of
from cluster.link import Link
from cluster.needs import missing, search_path
from cluster.room import Room

MOST_HOSTS = 250  # addresses of one network


class Cluster:
    """Hosts on one switch, for as long as a `with` block lasts.

    Args:
        hosts: how many.
        link: of each host.
        slots: ranks on each host.

    Raises:
        ClusterError: it cannot be made here, with the cure.
    """

    def __init__(self, hosts: int, link: Link | None = None, *, slots: int = 1) -> None:
        if not 1 <= hosts <= MOST_HOSTS:
            raise ClusterError(f"{hosts} hosts: give 1 to {MOST_HOSTS}")
        if slots < 1:
            raise ClusterError(f"{slots} ranks a host: give 1 or more")
        self._count, self.link, self.slots = hosts, link or Link(), slots
        self.hosts: list[Host] = []

    def __enter__(self) -> Cluster:
        if reason := missing(lossy=self.link.loss > 0):
            raise ClusterError(reason)
        self._room = Room()
        try:
            self._furnish()
        except BaseException:
            self._close()
            raise
        return self

    def _furnish(self) -> None:
        ssh.configure(self._room)
        self._name_hosts()
        self._room.check(["ip", "link", "add", BRIDGE, "type", "bridge"])
        self._room.check(["ip", "link", "set", BRIDGE, "up"])
        sshd = shutil.which("sshd", path=search_path())
        assert sshd is not None
        for number in range(1, self._count + 1):
            self.hosts.append(Host(self._room, number, self.link, sshd))

    def _name_hosts(self) -> None:
        numbers = range(1, self._count + 1)
        lines = [f"{address_of(number)} {name_of(number)}\n" for number in numbers]
        self._room.path("/run/hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))
        self._room.check(["mount", "--bind", "/run/hosts", "/etc/hosts"])

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def _close(self) -> None:
        self._room.close()
        for host in self.hosts:
            host.wait()

    @property
    def ranks(self) -> int:
        """Of all hosts together."""
        return self._count * self.slots

    def start(
        self, command: Sequence[str], settings: Mapping[str, str] | None = None, **rest: Any
    ) -> subprocess.Popen[bytes]:
        """Start a command on the first host; `horovodrun` is told of all (`cluster.horovod`).

        What still runs when the block ends is killed. The arguments are those of `Host.start`.
        """
        names = [host.name for host in self.hosts]
        return self.hosts[0].start(complete(command, names, self.slots), settings, **rest)

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
                left running is killed when the block ends.
        """
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = self.start(command, settings, stdin=subprocess.DEVNULL, **output)
        try:
            printed = process.communicate(timeout=limit_seconds)[0].decode(errors="replace")
        except subprocess.TimeoutExpired as late:
            process.kill()
            raise ClusterError(
                f"{' '.join(command)}: took longer than {limit_seconds:g} s\n"
                f"{(late.output or b'').decode(errors='replace')[-4000:]}"
            ) from late
        if process.returncode:
            raise ClusterError(
                f"{' '.join(command)}: exit status {process.returncode}\n{printed[-4000:]}"
            )
        return printed
