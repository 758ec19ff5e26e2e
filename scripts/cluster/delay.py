#!/usr/bin/env python3
"""The switch of a cluster whose links have a delay: a process that passes frames on, later.

    delay.py --delay 0.05 --rate 100000000 --queue 0.05 port1 port2

Each port is a TAP device that this program makes, and that becomes the card of a host: what the
host sends is read here, and what is written here the host receives. A frame goes to the port of its
destination, or to all others where that is not known yet, `delay` seconds after it came. A port
hands on `rate` bits a second; a frame that would wait longer than `queue` seconds for the others
ahead of it is dropped. Bundles of packets stay bundles: a header of the device's own (virtio's)
goes with them, so that a few thousand frames a second carry 100 Mbit/s to each of four hosts.

The kernel's netem could delay packets too, but many kernels are built without it.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0  # <linux/if_tun.h>
TAP, NO_PROTOCOL, WITH_HEADER = 0x0002, 0x1000, 0x4000
CHECKSUMS_AND_BUNDLES = 0x01 | 0x02 | 0x04  # the host may leave them to the card: TCP 4 and 6
HEADER = 10  # bytes of virtio's, ahead of a frame
LARGEST = HEADER + 14 + (64 << 10)  # bytes of a bundle
GROUP = 0x01  # in the first byte of an address of several hosts
AT_ONCE = 16  # frames that are read from a port before the others have their turn


class Port:
    """A port of the switch, and the frames that are on their way to its host.

    Args:
        name: of the TAP device.
        rate: bits a second to the host; 0: no limit.
        queue: seconds that a frame waits for others at most.
    """

    def __init__(self, name: str, rate: float, queue: float) -> None:
        self.device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        request = struct.pack("16sH22x", name.encode(), TAP | NO_PROTOCOL | WITH_HEADER)
        fcntl.ioctl(self.device, TUNSETIFF, request)
        fcntl.ioctl(self.device, TUNSETOFFLOAD, CHECKSUMS_AND_BUNDLES)
        self._rate, self._queue, self._free = rate, queue, 0.0
        self._frames = deque[tuple[float, bytes]]()

    def add(self, frame: bytes, due: float) -> None:
        """Queue a frame for the host: due at a time, or as soon after it as the rate allows."""
        at = max(due, self._free)
        if at - due <= self._queue:
            self._frames.append((at, frame))
            if self._rate:
                self._free = at + 8 * (len(frame) - HEADER) / self._rate

    def next(self) -> float:
        """Return the time at which the next frame is due; infinity if there is none."""
        return self._frames[0][0] if self._frames else float("inf")

    def send(self, now: float) -> None:
        """Write the frames that are due. Frames to a host that is gone are dropped."""
        while self._frames and self._frames[0][0] <= now:
            with contextlib.suppress(OSError):
                os.write(self.device, self._frames.popleft()[1])


def switch(ports: Sequence[Port], delay: float) -> None:
    """Pass frames on for as long as this process lives."""
    alive, learned = {port.device: port for port in ports}, dict[bytes, Port]()
    while True:
        wait = min(port.next() for port in ports) - time.monotonic()
        readable = select.select(list(alive), (), (), min(max(0.0, wait), 3600.0))[0]
        for device in readable:
            for _ in range(AT_ONCE):
                try:
                    frame = os.read(device, LARGEST)
                except BlockingIOError:
                    break
                except OSError:  # its host is gone
                    del alive[device]
                    break
                due = time.monotonic() + delay
                to, source = frame[HEADER : HEADER + 6], frame[HEADER + 6 : HEADER + 12]
                learned[source] = alive[device]
                found = None if to[0] & GROUP else learned.get(to)
                for port in (found,) if found else ports:
                    if port is not alive[device]:
                        port.add(frame, due)
        now = time.monotonic()
        for port in ports:
            port.send(now)


def main() -> int:
    """Make the ports, say that they are there, and pass frames on."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--delay", type=float, required=True, help="seconds, one way")
    parser.add_argument("--rate", type=float, default=0.0, help="bits a second; 0: no limit")
    parser.add_argument("--queue", type=float, required=True, help="seconds")
    parser.add_argument("ports", nargs="+")
    args = parser.parse_args()
    ports = [Port(name, args.rate, args.queue) for name in args.ports]
    print("ready", flush=True)
    switch(ports, args.delay)
    return 0


if __name__ == "__main__":
    sys.exit(main())
