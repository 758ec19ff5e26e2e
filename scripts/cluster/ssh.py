"""Settings of ssh and sshd for a room: any process of it may log in on any of its hosts."""

from __future__ import annotations

from cluster.errors import ClusterError
from cluster.room import Room
from cluster.variables import variables

KEY = "/etc/ssh/room_key"

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


def configure(room: Room) -> None:
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
