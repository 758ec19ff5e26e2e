"""The cluster: a room, a switch and hosts, between which ssh and `horovodrun` work."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.host import BRIDGE, INTERFACE, Host, address_of, name_of, port_of
from cluster.link import Link
from cluster.needs import NAMESPACES, ClusterError, missing, search_path, variables
from cluster.room import END_SECONDS, READY, Room, environment

MOST_HOSTS = 250  # addresses of one network
KEY = "/etc/ssh/room_key"
RELAY = Path(__file__).with_name("delay.py")
FIRST = ("nice", "-n", "-20")  # a switch does not wait while hosts compute

# ServerAlive: ssh notices a host that has lost its power, and horovodrun that ssh has ended.
CLIENT = f"""\
Host *
  IdentityFile {KEY}
  UserKnownHostsFile /dev/null
  StrictHostKeyChecking no
  LogLevel ERROR
  ServerAliveInterval 2
  ServerAliveCountMax 3
"""

# MaxStartups: horovodrun connects for all ranks at once. UsePAM: root may have no password.
SERVER = """\
HostKey {key}
AuthorizedKeysFile {key}.pub
PermitRootLogin yes
PasswordAuthentication no
StrictModes no
UsePAM no
PidFile none
MaxStartups 1000
MaxSessions 1000
SetEnv {variables}
"""


class Cluster:
    """Hosts on one switch, for as long as a `with` block lasts."""

    def __init__(self, hosts: int, link: Link | None = None, *, slots: int = 1) -> None:
        if not 1 <= hosts <= MOST_HOSTS:
            raise ClusterError(f"{hosts} hosts: give 1 to {MOST_HOSTS}")
        if slots < 1:
            raise ClusterError(f"{slots} ranks a host: give 1 or more")
        self._count, self.link, self.slots = hosts, link or Link(), slots
        self.hosts: list[Host] = []
        self._relay: subprocess.Popen[bytes] | None = None  # the switch of links with a delay

    def __enter__(self) -> Cluster:
        if reason := missing(lossy=self.link.loss > 0, delayed=self.link.delay > 0):
            raise ClusterError(reason)
        self._room = Room()
        try:
            self._furnish()
        except BaseException:
            self._close()
            raise
        return self

    def _furnish(self) -> None:
        _configure_ssh(self._room)
        self._name_hosts()
        self._make_switch()
        sshd = shutil.which("sshd", path=search_path())
        assert sshd is not None
        for number in range(1, self._count + 1):
            self.hosts.append(Host(self._room, number, self.link, sshd))

    def _make_switch(self) -> None:
        """Make the kernel's bridge, or start the program that passes frames on after a delay."""
        arguments = self.link.delaying()
        if not arguments:
            self._room.check(["ip", "link", "add", BRIDGE, "type", "bridge"])
            self._room.check(["ip", "link", "set", BRIDGE, "up"])
            return
        ports = [port_of(number) for number in range(1, self._count + 1)]
        command = [*FIRST, sys.executable, str(RELAY), *arguments, *ports]
        # Without the shell of `enter`, which would say that the room's end has killed it.
        enter = ["nsenter", "--target", str(self._room.pid), *NAMESPACES, "--"]
        self._relay = subprocess.Popen(
            [*enter, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env=environment(),
            start_new_session=True,
        )
        assert self._relay.stdout is not None
        if self._relay.stdout.readline() != READY:
            raise ClusterError("the switch with a delay could not be made; see above")

    def _name_hosts(self) -> None:
        numbers = range(1, self._count + 1)
        lines = [f"{address_of(number)} {name_of(number)}\n" for number in numbers]
        self._room.path("/run/hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))
        self._room.check(["mount", "--bind", "/run/hosts", "/etc/hosts"])

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        self._room.close()
        for host in self.hosts:
            host.wait()
        if self._relay is not None:
            self._relay.wait(END_SECONDS)
            assert self._relay.stdout is not None
            self._relay.stdout.close()

    def start(
        self, command: Sequence[str], settings: Mapping[str, str] | None = None, **rest: Any
    ) -> subprocess.Popen[bytes]:
        """Start a command on the first host, with all hosts in `horovodrun`'s host list.

        What still runs when the block ends is killed. The arguments are those of `Host.start`.
        """
        return self.hosts[0].start(self._complete(command), settings, **rest)

    def run(
        self,
        command: Sequence[str],
        settings: Mapping[str, str] | None = None,
        *,
        limit_seconds: float,
    ) -> str:
        """Run a command on the first host, as `start` does, and wait for it as `Host.run` does."""
        command = self._complete(command)
        return self.hosts[0].run(command, settings, limit_seconds=limit_seconds)

    def _complete(self, command: Sequence[str]) -> list[str]:
        return complete(command, [host.name for host in self.hosts], self.slots)


def complete(command: Sequence[str], hosts: Sequence[str], slots: int) -> list[str]:
    """`horovodrun ...` with the cluster's hosts, ranks and card, where it does not name its own.

    Its cache of what it found out about hosts is left out: theirs would outlive them. Any other
    command stays as it is.
    """
    program, *rest = command
    if Path(program).name != "horovodrun":
        return list(command)
    options = {
        ("-np", "--num-proc"): str(len(hosts) * slots),
        ("-H", "--hosts", "-hostfile", "--hostfile"): ",".join(f"{h}:{slots}" for h in hosts),
        ("--network-interfaces", "--network-interface"): INTERFACE,
    }
    added = ["--disable-cache"]
    for names, value in options.items():
        if not any(name in rest for name in names):
            added += [names[0], value]
    return [program, *added, *rest]


def _configure_ssh(room: Room) -> None:
    """Make the one key, which is every host's and every user's, and write the settings.

    Raises:
        ClusterError: sshd could not hand on a variable.
    """
    room.check(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", KEY])
    # Bash takes a shell of level 2 for one that a user's shell has started, and leaves ~/.bashrc
    # alone: it may take long, or put other programs in front on PATH.
    handed = {**variables(), "SHLVL": "1"}
    for name, value in handed.items():
        if '"' in value:
            raise ClusterError(f"{name} is {value}: sshd takes no quotation mark in a variable")
    written = " ".join(f'"{name}={value}"' for name, value in handed.items())
    room.path("/etc/ssh/ssh_config").write_text(CLIENT)
    room.path("/etc/ssh/sshd_config").write_text(SERVER.format(key=KEY, variables=written))
