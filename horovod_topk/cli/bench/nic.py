"""A host's network card: bytes that it has sent, its bandwidth, and its address.

The kernel's packet scheduler counts every packet with its headers, if the card has a scheduler. The
card's own counters count bundles of up to 64 KiB with one header for all packets of a bundle.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

SIOCGIFADDR = 0x8915  # netdevice(7): the address of an interface
HEADERS = 66  # header bytes of a packet: Ethernet 14, IP 20, TCP 32 (with timestamps)
LOOPBACK = "lo"
SCHEDULER, NIC = "packet scheduler", "network card"


@dataclass(frozen=True)
class Sent:
    """Packets and bytes that left a card."""

    packets: int
    bytes: int  # with headers; without the 24 bytes of preamble, checksum and gap per packet

    def __sub__(self, earlier: Sent) -> Sent:
        return Sent(self.packets - earlier.packets, self.bytes - earlier.bytes)

    @property
    def payload(self) -> int:
        """Bytes without the headers."""
        return self.bytes - HEADERS * self.packets


def bandwidth_of(interface: str) -> int | None:
    """A card's bandwidth in bit/s; None if it is unknown, or the card is virtual."""
    card = Path(f"/sys/class/net/{interface}")
    if not (card / "device").exists():
        return None
    try:
        megabits = int((card / "speed").read_text())
    except (OSError, ValueError):
        return None
    return megabits * 10**6 if megabits > 0 else None


def sent(interface: str) -> Sent:
    """Packets and bytes that this host has sent so far."""
    return scheduled(interface) or counted(interface)


def counter(interface: str) -> str:
    """The source of `sent`: the packet scheduler or the card."""
    return SCHEDULER if scheduled(interface) else NIC


def scheduled(interface: str) -> Sent | None:
    """Packets that the packet scheduler has sent; None without a scheduler or without `tc`."""
    tc = shutil.which("tc", path="/usr/sbin:/sbin:/usr/bin:/bin")
    if tc is None:
        return None
    command = [tc, "-statistics", "-json", "qdisc", "show", "dev", interface]
    shown = subprocess.run(command, capture_output=True, text=True)
    if shown.returncode != 0:
        return None
    roots = [each for each in json.loads(shown.stdout or "[]") if each.get("root")]
    if not roots or roots[0]["kind"] == "noqueue":
        return None
    return Sent(roots[0]["packets"], roots[0]["bytes"])


def counted(interface: str) -> Sent:
    """Packets that the card itself has counted."""
    folder = Path(f"/sys/class/net/{interface}/statistics")
    packets, octets = (int((folder / f"tx_{what}").read_text()) for what in ("packets", "bytes"))
    return Sent(packets, octets)


def address(interface: str) -> str:
    """The card's IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            found = fcntl.ioctl(any_socket.fileno(), SIOCGIFADDR, request)
        except OSError as error:
            known = ", ".join(name for _, name in socket.if_nameindex())
            raise ValueError(
                f"the network interface {interface!r} has no IPv4 address ({error.strerror}). "
                f"Name another with --interface, of {known}"
            ) from error
    return socket.inet_ntoa(found[20:24])


def interface_named(chosen: str | None, *, alone: bool) -> str | None:
    """The network card of the ranks: the user's or the launcher's; None if not known."""
    named = os.environ.get("HOROVOD_GLOO_IFACE") or os.environ.get("GLOO_SOCKET_IFNAME")
    found = chosen or named or _of_nccl()
    return LOOPBACK if found is None and alone else found


def _of_nccl() -> str | None:
    """The first card in NCCL_SOCKET_IFNAME, which horovodrun sets over MPI.

    A user may have set it to a prefix of names, or, after ^, to cards to exclude: then None.
    """
    first = os.environ.get("NCCL_SOCKET_IFNAME", "").split(",")[0].removeprefix("=")
    return first if first in {name for _, name in socket.if_nameindex()} else None
