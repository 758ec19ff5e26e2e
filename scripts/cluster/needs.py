"""Check what the machine lacks for a cluster, and return its programs' environment variables."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

PROGRAMS = {  # program -> Debian's package
    "ip": "iproute2",
    "tc": "iproute2",
    "mount": "mount",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
}
LOSSY = {"iptables": "iptables"}  # with packet loss alone
NAMESPACES = ("--mount", "--pid", "--net", "--uts", "--ipc")
# Run in namespaces of its own, so that nothing of it stays.
PROBE = """
set -e
mount -t tmpfs probe /run
ip link add switch type bridge
ip link add port type veth peer name card
tc qdisc add dev port root tbf rate 1mbit burst 16kb latency 50ms
"""
LOSSY_PROBE = "iptables --append INPUT --match statistic --mode random --probability 0.5\n"
DELAYED_PROBE = "ip tuntap add tap mode tap\n"
SBIN = ("/usr/local/sbin", "/usr/sbin", "/sbin")  # on no PATH but root's
SCRATCH = "/run/tmp"  # goes with the room, and with it what killed programs leave there


class ClusterError(Exception):
    """The cluster cannot be had; the message says what failed, and the cure where one is known."""


def search_path() -> str:
    """PATH, and where administrators' programs are."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), *SBIN])


def missing(*, lossy: bool = False, delayed: bool = False) -> str | None:
    """Why no cluster can be made here, with the cure; None where it can."""
    if os.geteuid() != 0:
        return "namespaces and links need root: run it with sudo, or as root in a container"
    programs = PROGRAMS | (LOSSY if lossy else {})
    absent = [name for name in programs if shutil.which(name, path=search_path()) is None]
    if absent:
        packages = " ".join(sorted({programs[name] for name in absent}))
        return (
            f"not installed: {', '.join(absent)}. On Debian and Ubuntu: apt-get install {packages}"
        )
    return _refused(PROBE + LOSSY_PROBE * lossy + DELAYED_PROBE * delayed)


def _refused(probe: str) -> str | None:
    """What the kernel does not let us do, with the cure."""
    command = ["unshare", *NAMESPACES, "--fork", "--mount-proc", "sh", "-c", probe]
    env = os.environ | {"PATH": search_path()}
    tried = subprocess.run(command, env=env, capture_output=True, text=True)
    if tried.returncode == 0:
        return None
    why = " ".join(tried.stderr.split())
    return (
        f"the kernel refuses ({why}): a container needs --privileged; a kernel, its modules for "
        "namespaces, veth, bridge, tun, sch_tbf and xt_statistic"
    )


def variables() -> dict[str, str]:
    """Return the environment variables that programs on a host need: PATH, TMPDIR and Open MPI's.

    Open MPI's wheel does not know where it was installed: mpirun finds out, but ranks that it
    starts on other hosts are told half of it, and fail.
    """
    found = {"PATH": search_path(), "TMPDIR": SCRATCH}
    mpirun = shutil.which("mpirun", path=found["PATH"])
    if mpirun is not None:
        prefix = Path(mpirun).parent.parent
        if (prefix / "pyvenv.cfg").is_file():
            found["OPAL_PREFIX"] = str(prefix)
    return found
