"""What a host's network card has sent.

The kernel's packet scheduler counts what a cable would carry. The card's own counters are of
bundles of up to 64 KiB, whose packets they give one header in all.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass

CARD = "eth0"
HEADERS = 66  # bytes of a packet that are no TCP payload: Ethernet 14, IP 20, TCP 32 (timestamps)


@dataclass(frozen=True)
class Sent:
    """Packets that left a card."""

    packets: int
    bytes: int  # with all headers; without preamble, checksum and gap: 24 bytes more on a cable

    def __sub__(self, earlier: Sent) -> Sent:
        return Sent(self.packets - earlier.packets, self.bytes - earlier.bytes)

    @property
    def payload(self) -> int:
        """Bytes without the headers."""
        return self.bytes - HEADERS * self.packets


def sent() -> Sent:
    """So far, by this host; its link has to be shaped, as an unshaped one has no scheduler."""
    shown = subprocess.run(
        ["tc", "-statistics", "-json", "qdisc", "show", "dev", CARD],
        stdout=subprocess.PIPE,
        check=True,
    )
    (root,) = (each for each in json.loads(shown.stdout) if each.get("root"))
    return Sent(root["packets"], root["bytes"])
