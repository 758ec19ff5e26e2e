"""What a cluster needs of the machine it is made on."""

from __future__ import annotations

import os
import shutil
import subprocess

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
SBIN = ("/usr/local/sbin", "/usr/sbin", "/sbin")  # on no PATH but root's


def search_path() -> str:
    """PATH, and where administrators' programs are."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), *SBIN])


def missing(*, lossy: bool = False) -> str | None:
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
    probe = ["unshare", *NAMESPACES, "--fork", "--mount-proc", "true"]
    tried = subprocess.run(probe, capture_output=True, text=True)
    if tried.returncode:
        why = tried.stderr.strip()
        return f"no namespaces ({why}): a container needs --privileged, or --cap-add of SYS_ADMIN"
    return None
